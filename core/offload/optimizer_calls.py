"""What an optimizer's methods do while its steps are overlapped, and how they come off again.

What this module does not do: it steps nothing; ``overlapped_steps`` does.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import optim

from ..errors import RequestError

if TYPE_CHECKING:
    from .overlapped_steps import OverlappedSteps


class OptimizerCalls:
    """Replace ``step`` and ``zero_grad`` of one optimizer, and settle before its state is taken or given.

    Args:
        optimizer: Whose methods are replaced.
        owner: Does the steps; not kept alive.

    Attributes:
        inner_step: ``step`` as it was.
    """

    def __init__(self, optimizer: optim.Optimizer, owner: OverlappedSteps) -> None:
        # Weak: the optimizer must not keep the manager's memory alive.
        reference = weakref.ref(owner)
        self.inner_step: Callable[..., Any] = optimizer.step
        self._optimizer = optimizer
        self._before = {name: optimizer.__dict__.get(name) for name in ("step", "zero_grad")}
        self._own = {
            "step": _make_step(reference, optimizer.step),
            "zero_grad": _make_zero_grad(reference, optimizer.zero_grad),
        }
        for name, function in self._own.items():
            optimizer.__dict__[name] = types.MethodType(function, optimizer)

        def settle(*_: Any) -> None:
            steps = reference()
            if steps is not None and steps.is_on:
                steps.settle()

        self._handles = [
            optimizer.register_state_dict_pre_hook(settle),
            optimizer.register_load_state_dict_pre_hook(settle),
        ]

    def remove(self) -> None:
        """Give the optimizer its methods back; may be called again."""
        for handle in self._handles:
            handle.remove()
        for name, function in self._own.items():
            present = self._optimizer.__dict__.get(name)
            if getattr(present, "__func__", None) is not function:
                continue  # wrapped by other code since, which ours lets through
            if self._before[name] is not None:
                self._optimizer.__dict__[name] = self._before[name]
            else:
                del self._optimizer.__dict__[name]


_Owner = Callable[[], "OverlappedSteps | None"]


def _make_step(reference: _Owner, inner: Callable[..., Any]) -> Callable[..., Any]:
    def step(optimizer: optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        steps = reference()
        if steps is None or not steps.is_on:
            return inner(closure)
        if closure is not None:
            raise RequestError(
                "step() was called with a closure on an overlapped optimizer",
                limit="Parameters are stepped during the backward, which the closure would run again",
                way_out="Call the backward yourself, then step()",
            )
        return steps.end_round()

    return step


def _make_zero_grad(reference: _Owner, inner: Callable[..., None]) -> Callable[..., None]:
    def zero_grad(optimizer: optim.Optimizer, set_to_none: bool = True) -> None:
        steps = reference()
        if not set_to_none and steps is not None and steps.is_on:
            steps.settle()
        inner(set_to_none=set_to_none)

    return zero_grad
