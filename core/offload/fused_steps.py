"""torch's fused kernel for Adam and AdamW on host parameters, without the caller asking.

By default torch steps CPU parameters with one operation after another over memory, about four times
the traffic of its own fused kernel. A caller who passed neither ``fused`` nor ``foreach`` left that
choice to torch; here it is made for parameters whose home is the host: the group's ``fused`` entry is
True while its ``step()`` runs and None again after it. The formula and the order of its terms are the
same; results differ by rounding of the last bits in fp32 and fp64, so only these two are switched.
Whoever passed ``fused`` or ``foreach`` gets what was asked for.

Fused kernels, also those that the caller asked for, do not count up the versions of what they change,
by which the engine knows old copies of a weight; so every step of a managed parameter is noted here.

What this module does not do: it steps nothing itself; the caller's ``optimizer.step()`` does.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from .segments import extent_bytes
from .tensors import ManagedTensor

FUSED_OPTIMIZERS = (torch.optim.Adam, torch.optim.AdamW)
_DTYPES = (torch.float32, torch.float64)


# Hooks of managers that were collected. That may happen while torch walks through its hooks, so they are
# taken off later; until then they do nothing.
_retired: list[RemovableHandle] = []


class FusedSteps:
    """Switch suitable parameter groups, for as long as a manager is attached.

    Args:
        find: Returns what manages a parameter whose home is the host, None for any other.
        before_change: Called before any optimizer changes such a parameter.
    """

    def __init__(
        self,
        find: Callable[[torch.Tensor], ManagedTensor | None],
        *,
        before_change: Callable[[], object] = lambda: None,
    ) -> None:
        self._find = find
        self._before_change = before_change
        self._switched: list[dict[str, Any]] = []
        # Weak: torch's list of hooks must not keep a forgotten manager alive.
        owner = weakref.ref(self)
        self._handles = [
            register_optimizer_step_pre_hook(functools.partial(_before_step, owner)),
            register_optimizer_step_post_hook(functools.partial(_after_step, owner)),
        ]
        _take_off_retired()
        self._finalizers = [weakref.finalize(self, _retired.append, handle) for handle in self._handles]

    def switch(self, optimizer: torch.optim.Optimizer) -> None:
        """Ask for the fused kernel in every group that it suits."""
        self.switch_back()
        if type(optimizer) not in FUSED_OPTIMIZERS:
            return
        for group in optimizer.param_groups:
            stepped = [parameter for parameter in group["params"] if parameter.grad is not None]
            if (
                stepped
                and all(self._find(parameter) is not None for parameter in stepped)
                and suits_fused_kernel(group, stepped, optimizer.state)
            ):
                group["fused"] = True
                self._switched.append(group)

    def prepare(self, optimizer: torch.optim.Optimizer) -> None:
        """Let what is under way end before the optimizer changes what it steps."""
        if any(True for _ in self._stepped_by(optimizer)):
            self._before_change()

    def note_change(self, optimizer: torch.optim.Optimizer) -> None:
        """Record that the optimizer changes what it steps."""
        for managed in self._stepped_by(optimizer):
            managed.generation += 1

    def _stepped_by(self, optimizer: torch.optim.Optimizer) -> Iterator[ManagedTensor]:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                managed = self._find(parameter)
                if managed is not None and parameter.grad is not None:
                    yield managed

    def switch_back(self) -> None:
        """Leave every group as it was; also after a step that raised."""
        for group in self._switched:
            group["fused"] = None
        self._switched.clear()

    def remove(self) -> None:
        """Take the hooks off."""
        self.switch_back()
        for finalizer in self._finalizers:
            finalizer()
        _take_off_retired()


def _take_off_retired() -> None:
    while _retired:
        _retired.pop().remove()


def suits_fused_kernel(group: dict[str, Any], parameters: list[torch.Tensor], state: Any) -> bool:
    """Return whether the fused kernel computes the same for this group, which left the choice open.

    Args:
        group: Hyperparameters of Adam or AdamW.
        parameters: Those with a gradient.
        state: The optimizer's state.
    """
    if group.get("fused") is not None or group.get("foreach") is not None:
        return False
    if group.get("differentiable") or group.get("capturable"):
        return False
    if any(isinstance(value, torch.Tensor) for value in (group["lr"], *group["betas"])):
        return False
    return all(_has_plain_memory(parameter, state.get(parameter, {})) for parameter in parameters)


def _has_plain_memory(parameter: torch.Tensor, state: dict[str, Any]) -> bool:
    """The kernel walks memory: everything of a parameter must lie in the same order, without holes."""
    gradient = parameter.grad
    assert gradient is not None
    if parameter.dtype not in _DTYPES or parameter.device.type != "cpu":
        return False
    if extent_bytes(parameter) != parameter.numel() * parameter.dtype.itemsize:
        return False
    moments = [value for name, value in state.items() if name != "step" and isinstance(value, torch.Tensor)]
    return all(
        other.layout == torch.strided
        and other.dtype == parameter.dtype
        and other.device == parameter.device
        and other.stride() == parameter.stride()
        for other in (gradient, *moments)
    )


_Owner = Callable[[], FusedSteps | None]


def _before_step(owner: _Owner, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    steps = owner()
    if steps is None:
        return
    steps.prepare(optimizer)
    steps.note_change(optimizer)  # also if the step raises half way
    # With a closure the gradients that count are not there yet.
    if len(args) <= 1 and kwargs.get("closure") is None:
        steps.switch(optimizer)


def _after_step(owner: _Owner, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    steps = owner()
    if steps is not None:
        steps.note_change(optimizer)
        steps.switch_back()
