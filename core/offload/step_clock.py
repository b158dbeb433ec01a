"""How long steps take, and how much of that the target only waits for copies.

A step here begins with its first forward and ends with ``after_backward()``. On CUDA both ends, and the
two sides of every wait for a copy that is not there yet, are events on the computing stream: what lies
between the two sides of a wait is time in which the GPU had nothing to do. They are read when they are
over, so timing makes nobody wait. On the CPU copies are made when they are needed; all of their time
is waiting.

What this module does not do: it decides nothing; ``step_timer`` measures for the planner.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal

import torch

from .marks import Mark, is_over, mark_now, seconds_between

Bound = Literal["link-bound", "compute-bound"]

# A step that waits for more than this share of its time would gain by fewer bytes, not by a faster GPU.
LINK_BOUND_SHARE = 0.05
_MAX_OPEN_WAITS = 256


def bound_of(step_s: float, stalled_s: float) -> Bound:
    """Return "link-bound" if waiting took more than 5 % of the time, else "compute-bound"."""
    return "link-bound" if stalled_s > LINK_BOUND_SHARE * step_s else "compute-bound"


@dataclass(frozen=True)
class StepStats:
    """One step, from its first forward to ``after_backward()``.

    Attributes:
        step_s: Its length in seconds.
        stalled_s: Seconds of it in which the target waited for weights.
        moved_to_target_bytes: Bytes copied to the target.
        moved_to_host_bytes: Bytes copied to the host.
    """

    step_s: float
    stalled_s: float
    moved_to_target_bytes: int
    moved_to_host_bytes: int

    @property
    def bound(self) -> Bound:
        """What limits it; see ``bound_of``."""
        return bound_of(self.step_s, self.stalled_s)


@dataclass(eq=False)
class _Span:
    """A step whose marks may not be over yet; byte counts are those of its start, then its own."""

    start: Mark
    moved: tuple[int, int]
    waits: deque[tuple[Mark, Mark]]
    stop: Mark | None = None
    stalled_s: float = 0.0

    def collect(self) -> None:
        """Add up the waits that are over."""
        while self.waits and is_over(self.waits[0][1]):
            self.stalled_s += seconds_between(*self.waits.popleft())


class StepClock:
    """Times the steps of one engine.

    Args:
        device: The target.

    Attributes:
        num_steps: Steps that ended and were read.
        step_s: Their length.
        stalled_s: Their waiting.
        last: The latest of them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._open: _Span | None = None
        self._ended: deque[_Span] = deque()
        self.num_steps = 0
        self.step_s = 0.0
        self.stalled_s = 0.0
        self.last: StepStats | None = None

    def mark(self) -> Mark:
        """Return this moment of the computing stream."""
        return mark_now(self._device)

    def begin(self, moved: tuple[int, int]) -> None:
        """Begin a step, unless one is open; ``moved`` are the bytes to target and host so far."""
        if self._open is None:
            self._open = _Span(self.mark(), moved, deque())

    def waited(self, start: Mark) -> None:
        """Note that the target has waited for a copy since ``start``."""
        if self._open is None:
            return
        self._open.waits.append((start, self.mark()))
        if len(self._open.waits) > _MAX_OPEN_WAITS:
            self._open.collect()

    def end(self, moved: tuple[int, int]) -> bool:
        """End the step, if one is open; return whether one was."""
        span, self._open = self._open, None
        if span is not None:
            span.stop = self.mark()
            span.moved = moved[0] - span.moved[0], moved[1] - span.moved[1]
            self._ended.append(span)
            self.read(wait=False)
        return span is not None

    def read(self, *, wait: bool) -> None:
        """Add the steps that are over to the sums; with ``wait`` all that have ended."""
        while self._ended:
            span = self._ended[0]
            assert span.stop is not None
            if wait and isinstance(span.stop, torch.cuda.Event):
                span.stop.synchronize()
            if not is_over(span.stop):
                return
            self._ended.popleft()
            span.collect()
            self.last = StepStats(seconds_between(span.start, span.stop), span.stalled_s, *span.moved)
            self.num_steps += 1
            self.step_s += self.last.step_s
            self.stalled_s += self.last.stalled_s
