"""How long forward and backward take, and how much of that is waiting for copies.

On CUDA the marks are events on the current stream: what is measured is the device's time, and marking
does not wait. On the CPU copies are part of the pass, so their time counts as waiting.

What this module does not do: it decides nothing; see ``tuner``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from typing_extensions import override

from .marks import Mark, mark_now, seconds_between

if TYPE_CHECKING:
    from .buckets import Bucket
    from .engine import Engine


class StepTimer:
    """Collects spans of one step.

    Args:
        device: The target.

    Attributes:
        used: Every bucket that a forward used, in order.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._open: dict[str, Mark] = {}
        self._spans: dict[str, list[tuple[Mark, Mark]]] = {}
        self.used: dict[int, Bucket] = {}

    def mark(self) -> Mark:
        """Return this moment."""
        return mark_now(self._device)

    def begin(self, kind: str) -> None:
        """Begin a span, unless one of its kind is open."""
        if kind not in self._open:
            self._open[kind] = self.mark()

    def end(self, kind: str) -> None:
        """End the span of this kind, if one is open."""
        start = self._open.pop(kind, None)
        if start is not None:
            self.add(kind, start)

    def add(self, kind: str, start: Mark) -> None:
        """Add a span from ``start`` to now."""
        self._spans.setdefault(kind, []).append((start, self.mark()))

    def waited(self, start: Mark) -> None:
        """Note that the passes that run have waited for a copy since ``start``."""
        for kind in list(self._open):
            self.add(f"{kind} wait", start)

    def use(self, bucket: Bucket) -> None:
        """Note that a forward uses the bucket."""
        self.used.setdefault(id(bucket), bucket)

    def seconds(self, kind: str) -> float:
        """Return the length of all spans of a kind; waits for the device."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return sum(seconds_between(start, stop) for start, stop in self._spans.get(kind, ()))

    def compute_seconds(self, kind: str) -> float:
        """Return the seconds of a kind of pass without its waiting."""
        return max(0.0, self.seconds(kind) - self.seconds(f"{kind} wait"))


class IdleTimer(StepTimer):
    """Measures nothing, at no cost."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))

    @override
    def mark(self) -> Mark:
        return 0.0

    @override
    def begin(self, kind: str) -> None:
        pass

    @override
    def use(self, bucket: Bucket) -> None:
        pass


def watch(engine: Engine, timer: StepTimer) -> StepTimer:
    """Time what an engine does from now on with ``timer``; return the one before."""
    before, engine.timer = engine.timer, timer
    engine.transfer.timer = timer
    return before
