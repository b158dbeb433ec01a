"""What the engine reports about itself; all sizes in bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

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
        host_bytes: Host memory of masters and of host gradients.
        moved_to_target_bytes: Bytes copied to the target so far.
        moved_to_host_bytes: Bytes copied to the host so far (gradients and changed buffers).
        num_units: Modules, or groups of modules, that move together.
        num_buckets: Separate copies that moving everything takes.
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


def take_snapshot(engine: Engine, *, num_units: int) -> OffloadStats:
    """Return what the parts of the engine say now."""
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
    )
