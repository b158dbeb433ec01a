"""What the engine reports about itself; all sizes in bytes."""

from __future__ import annotations

from dataclasses import dataclass


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
