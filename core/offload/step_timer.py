"""How long forward and backward take, how much of that is waiting for copies, and what memory they take.

On CUDA the marks are events on the current stream: what is measured is the device's time, and marking
does not wait. On the CPU copies are part of the pass, so their time counts as waiting.

What this module does not do: it decides nothing; see ``tuner``.
"""

from __future__ import annotations

from collections.abc import Callable
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
        slot_bytes: Returns the target memory that weights have at present; None: memory is not looked at.

    Attributes:
        used: Every bucket that a forward used, in order.
        other_bytes: The most memory besides weights that was in use between two of these uses (CUDA only).
    """

    def __init__(self, device: torch.device, *, slot_bytes: Callable[[], int] | None = None) -> None:
        self._device = device
        self._slot_bytes = slot_bytes if device.type == "cuda" else None
        self._last_slot_bytes = slot_bytes() if slot_bytes else 0
        self.other_bytes = 0
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

    def use(self, bucket: Bucket, *, is_recompute: bool = False) -> None:
        """Note that a forward, or a recompute, uses the bucket."""
        if not is_recompute:
            self.used.setdefault(id(bucket), bucket)
        self.note_peak()

    def note_peak(self) -> None:
        """Look at the peak since the last use of a bucket, and begin a new one."""
        if self._slot_bytes is None:
            return
        slot_bytes = self._slot_bytes()
        peak = torch.cuda.max_memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        # Whether slots came or went before the peak is not known.
        self.other_bytes = max(self.other_bytes, peak - min(slot_bytes, self._last_slot_bytes))
        self._last_slot_bytes = slot_bytes

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
    def use(self, bucket: Bucket, *, is_recompute: bool = False) -> None:
        pass


def watch(engine: Engine, timer: StepTimer) -> StepTimer:
    """Time what an engine does from now on with ``timer``; return the one before."""
    before, engine.timer = engine.timer, timer
    engine.transfer.timer = timer
    return before
