"""What to do when a loss or a gradient is NaN or infinite: skip, go back, or stop, and say where it began.

One bad batch (an overflow in half precision) must not end a training of hours, and adapters that have
run away must not be saved. A step with a value that is not finite changes nothing: neither the
adapters nor the optimizer. If the next one fails too, the adapters themselves are to blame and go back
to where they last worked; if nothing helps, the training ends.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import TrainingError

GIVE_UP_AFTER = 5
RESTORE_AFTER = 2
SNAPSHOT_EVERY = 20


@dataclass(frozen=True)
class Trouble:
    """Something that is not finite.

    Attributes:
        what: ``"the loss"`` or ``"a gradient"``.
        layer: Where it first appeared, as a dotted path with words around it.
    """

    what: str
    layer: str


class NanGuard:
    """Counts failures in a row and keeps the last state that worked.

    Args:
        take: Returns a copy of everything that a step changes.
        put_back: Writes such a copy back.
    """

    def __init__(self, take: Callable[[], Any], put_back: Callable[[Any], None]) -> None:
        self._take = take
        self._put_back = put_back
        self._good: Any = None
        self._saved: Any = None
        self._good_step = self._good_attempt = 0
        self._in_a_row = 0

    @property
    def good(self) -> tuple[Any, int, int] | None:
        """The last state that worked, with its step and the attempt that it goes on with; None before one."""
        return None if self._good is None else (self._good, self._good_step, self._good_attempt)

    def passed(self, step: int, *, attempt: int) -> None:
        """Note that loss and gradients of a step are finite; called before the step changes anything."""
        self._in_a_row = 0
        if self._saved is not None:
            self._good, self._good_step, self._good_attempt = self._saved, step, attempt
        elif self._good is None or step % SNAPSHOT_EVERY == 0:
            self._good, self._good_step, self._good_attempt = self._take(), step, attempt
        self._saved = None

    def saved(self, state: Any) -> None:
        """Note that ``state`` is saved, or was loaded: if it works, it is what to go back to.

        A training that is resumed from it then goes back to the same as the one that saved it.
        """
        self._saved = state

    def failed(self, trouble: Trouble, *, step: int, steps: int, learning_rate: float) -> str:
        """Deal with a failure and return what was done, as a line to show.

        Raises:
            TrainingError: After too many in a row.
        """
        self._in_a_row += 1
        where = f"{trouble.what} of step {step + 1} of {steps} is NaN or infinite, first in {trouble.layer}"
        if self._in_a_row >= GIVE_UP_AFTER:
            raise TrainingError(
                f"{where}, {self._in_a_row} times in a row (learning_rate={learning_rate}). The adapters are "
                "kept as they were when they last worked. Lower the learning rate, look at the data, or "
                "compute in fp32 or bf16."
            )
        if self._in_a_row >= RESTORE_AFTER and self._good is not None:
            self._put_back(self._good)
            return f"{where}; the step is skipped and the LoRA is back at step {self._good_step}"
        return f"{where}; the step is skipped"


def find_layer(network: nn.Module, forward: Callable[[], object]) -> str:
    """Run ``forward`` again without gradients and return the first module whose output is not finite.

    Args:
        network: The module that ``forward`` calls.
        forward: Repeats the computation; its result is dropped.
    """
    found: list[str] = []
    with torch.no_grad(), _watched(network, found):
        forward()
    return found[0] if found else "the loss itself (every layer's output is finite)"


@contextlib.contextmanager
def _watched(network: nn.Module, found: list[str]) -> Iterator[None]:
    handles = []
    try:
        for path, module in network.named_modules():
            # Inner modules end before outer ones, so the first note is the innermost place.
            hook = _note(path or type(network).__name__, found)
            handles.append(module.register_forward_hook(hook, with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _note(path: str, found: list[str]) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        if not found and not _all(output, torch.isfinite):
            # Minus infinity is what masks are made of.
            fed = _all((args, kwargs), lambda tensor: ~tensor.isnan() & ~tensor.isposinf())
            found.append(f"the {'output' if fed else 'input'} of {path}")

    return hook


def _all(value: Any, good: Callable[[Tensor], Tensor]) -> bool:
    if isinstance(value, Tensor):
        return not value.is_floating_point() or bool(good(value).all())
    if isinstance(value, dict):
        return all(_all(item, good) for item in value.values())
    if isinstance(value, list | tuple):
        return all(_all(item, good) for item in value)
    return True
