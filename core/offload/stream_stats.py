"""What weight streaming reports about itself, and the clock behind it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .marks import Mark, is_over, mark_now, seconds_between

if TYPE_CHECKING:
    from .stream_buffers import StreamPool

# Above this share of a pass spent waiting for copies, the link decides the speed.
_LINK_BOUND_SHARE = 0.05
_MAX_PENDING = 8
_NUM_FIRST = 4
_INTERVAL_S = 0.25


@dataclass(frozen=True)
class StreamStats:
    """A snapshot of one streamed model.

    Attributes:
        weight_bytes: All weights.
        target_bytes: Target memory held for them now: rim, resident blocks and slots.
        num_resident: Blocks that stay on the target as a whole.
        num_streamed: Blocks of which all or a part is copied in for each pass.
        streamed_bytes: What is copied of them for each pass.
        slot_bytes: Target memory of the slots, shared by all models of the pool.
        host_bytes: Host memory of the arena.
        file_bytes: Weights that are read from their file for each copy.
        pinned_bytes: Host memory registered with CUDA, of all models of the pool.
        moved_bytes: Bytes copied to the target so far, by all models of the pool.
        num_passes: Forwards so far.
        pass_s: Seconds of the last measured forward; 0 before one.
        stall_s: Seconds of it that waited for copies.
    """

    weight_bytes: int
    target_bytes: int
    num_resident: int
    num_streamed: int
    streamed_bytes: int
    slot_bytes: int
    host_bytes: int
    file_bytes: int
    pinned_bytes: int
    moved_bytes: int
    num_passes: int
    pass_s: float
    stall_s: float

    @property
    def stall_share(self) -> float:
        """Share of the last pass that waited for copies, 0 to 1."""
        return min(1.0, self.stall_s / self.pass_s) if self.pass_s else 0.0

    @property
    def bound_by(self) -> str:
        """What the last pass waited for: ``"link"`` or ``"compute"``."""
        return "link" if self.stall_share > _LINK_BOUND_SHARE else "compute"


def snapshot(
    pool: StreamPool,
    clock: PassClock,
    *,
    masters: Sequence[tuple[int, bool]],
    rests: Sequence[int],
    target_bytes: int,
) -> StreamStats:
    """Return the stats of one model.

    Args:
        pool: Its pool.
        clock: Its clock.
        masters: Bytes of the rim and of each block, and whether they are in the arena.
        rests: For each block, what of it does not stay on the target.
        target_bytes: Target memory held now.
    """
    host_bytes = sum(nbytes for nbytes, is_in_arena in masters if is_in_arena)
    pass_s, stall_s = clock.read()
    return StreamStats(
        weight_bytes=sum(nbytes for nbytes, _ in masters),
        target_bytes=target_bytes,
        num_resident=sum(rest == 0 for rest in rests),
        num_streamed=sum(rest > 0 for rest in rests),
        streamed_bytes=sum(rests),
        slot_bytes=pool.slot_bytes,
        host_bytes=host_bytes,
        file_bytes=sum(nbytes for nbytes, _ in masters) - host_bytes,
        pinned_bytes=pool.pinned_bytes,
        moved_bytes=pool.transfer.moved_to_target_bytes,
        num_passes=clock.num_passes,
        pass_s=pass_s,
        stall_s=stall_s,
    )


class PassClock:
    """Measures forwards and the waits inside them; on CUDA with events, which nobody waits for.

    The first passes are measured, and then as many as somebody who looks on needs: marks cost host time.

    Args:
        device: Where the model computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[Mark] = []
        self._waits: list[tuple[Mark, Mark]] = []
        self._pending: deque[tuple] = deque(maxlen=_MAX_PENDING)
        self._is_running = False
        self._measures = True
        self._measured_s = float("-inf")
        # On the CPU a copy is over when its start returns, so it is waited for wherever it is started.
        self.copies_block = device.type != "cuda"
        self.num_passes = 0
        self.pass_s = 0.0
        self.stall_s = 0.0

    def now(self) -> Mark:
        """Return a moment on the current stream, or of the host's clock; any, where nothing is measured."""
        return mark_now(self._device) if self._measures else 0.0

    def begin_pass(self) -> None:
        """Note that a forward starts."""
        now_s = time.monotonic()
        self._measures = self.num_passes < _NUM_FIRST or now_s - self._measured_s >= _INTERVAL_S
        if self._measures:
            self._measured_s = now_s
        self._waits, self._marks, self._is_running = [], [self.now()], True

    def end_pass(self, *, is_complete: bool) -> None:
        """Note that it is over; a broken one does not count."""
        self._is_running = False
        if not is_complete:
            return
        self.num_passes += 1
        if not self._measures:
            return
        self._pending.append((self._marks[0], self.now(), self._waits))
        self._resolve()

    def waited(self, begin: Mark, end: Mark) -> None:
        """Note that a copy was waited for between two moments."""
        if self._is_running and self._measures:
            self._waits.append((begin, end))

    def read(self) -> tuple[float, float]:
        """Return seconds of the last measured pass and of its waits."""
        self._resolve()
        return self.pass_s, self.stall_s

    def _resolve(self) -> None:
        while self._pending:
            begin, end, waits = self._pending[0]
            if not is_over(end):
                return
            self._pending.popleft()
            self.pass_s = seconds_between(begin, end)
            self.stall_s = sum(seconds_between(first, last) for first, last in waits)
