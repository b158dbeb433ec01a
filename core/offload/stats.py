"""What the engine reports about itself: sizes in bytes, times in seconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .step_clock import Bound, StepStats, bound_of

if TYPE_CHECKING:
    from .engine import Engine


@dataclass(frozen=True)
class OffloadStats:
    """A snapshot.

    Attributes:
        resident_bytes: Managed bytes on the target now.
        resident_set_bytes: Managed bytes that are meant to stay there.
        peak_resident_bytes: The most that ``resident_bytes`` has been.
        streamed_bytes: Managed bytes whose masters are on the host.
        slot_bytes: Target memory held for streaming, used or free.
        pinned_bytes: Host memory registered with CUDA.
        pinning: What could be pinned and why not more, in words; empty where nothing is to be pinned.
        host_bytes: Host memory of masters and of host gradients.
        moved_to_target_bytes: Bytes copied to the target so far.
        moved_to_host_bytes: Bytes copied to the host so far (gradients and changed buffers).
        num_units: Modules, or groups of modules, that move together.
        num_buckets: Separate copies that moving everything takes.
        num_steps: Steps so far, each from its first forward to ``after_backward()``.
        step_s: Their length in seconds.
        stalled_s: Seconds of it in which the target waited for weights.
        last_step: The latest of them, None before the first has ended.
    """

    resident_bytes: int
    resident_set_bytes: int
    peak_resident_bytes: int
    streamed_bytes: int
    slot_bytes: int
    pinned_bytes: int
    host_bytes: int
    moved_to_target_bytes: int
    moved_to_host_bytes: int
    num_units: int
    num_buckets: int
    num_steps: int
    step_s: float
    stalled_s: float
    last_step: StepStats | None
    pinning: str = ""

    @property
    def bound(self) -> Bound | None:
        """What limits the steps so far: "link-bound" if they waited for more than 5 % of their time."""
        return bound_of(self.step_s, self.stalled_s) if self.num_steps else None


def take_snapshot(engine: Engine, *, num_units: int) -> OffloadStats:
    """Return what the parts of the engine say now."""
    clock = engine.transfer.clock
    clock.read(wait=True)
    residency, store, transfer = engine.residency, engine.store, engine.transfer
    return OffloadStats(
        resident_bytes=residency.resident_bytes,
        resident_set_bytes=residency.resident_set_bytes + residency.kept_bytes,
        peak_resident_bytes=residency.peak_resident_bytes,
        streamed_bytes=store.streamed_bytes,
        slot_bytes=residency.pool.allocated_bytes,
        pinned_bytes=store.pinned_bytes,
        host_bytes=store.host_bytes,
        moved_to_target_bytes=transfer.moved_to_target_bytes,
        moved_to_host_bytes=transfer.moved_to_host_bytes,
        num_units=num_units,
        num_buckets=len(store.buckets),
        num_steps=clock.num_steps,
        step_s=clock.step_s,
        stalled_s=clock.stalled_s,
        last_step=clock.last,
        pinning=store.pinning.report if store.pinning is not None else "",
    )
