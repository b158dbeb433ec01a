"""Flat pieces of target memory that buckets take turns in.

A slot knows from its storage's use count whether anybody outside the engine still holds a view of
it (an operator in mid-backward, an output that is a view of a weight). Such a slot is never reused.

What this module does not do: it copies nothing; ``residency`` decides who gets a slot.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .transfer import Transfer

if TYPE_CHECKING:
    from .buckets import Bucket, Segment

# A free slot is reused for anything down to half its size; below this, whatever the ratio.
_SMALL_BYTES = 2**20
_GRANULE_BYTES = 512


class Slot:
    """One piece of target memory.

    Attributes:
        flat: The memory, uint8 ``[capacity]``.
        bucket: Whose bytes are in it; None if nobody's. A free slot keeps them until it is reused.
        versions: Version of each of its segments at the time; None where the slot's bytes are out of date.
        is_kept: Whether it was taken for a bucket that stays.
    """

    def __init__(self, transfer: Transfer, nbytes: int) -> None:
        self.flat = transfer.allocate(nbytes)
        self.storage = self.flat.untyped_storage()
        self.lease = transfer.open_lease()
        self.bucket: Bucket | None = None
        self.versions: list[int | None] = []
        self.is_kept = False
        self._idle_count = self._use_count()

    @property
    def capacity_bytes(self) -> int:
        """Size of the memory."""
        return self.flat.numel()

    @property
    def address(self) -> int:
        """Where the memory starts; the key that saved tensors are recognised by."""
        return self.storage.data_ptr()

    def note_content(self, bucket: Bucket) -> None:
        """Record that the slot holds the bucket's bytes as they are now."""
        self.bucket = bucket
        self.versions = [segment.version() for segment in bucket.segments]

    def is_current(self, segment: Segment | None = None) -> bool:
        """Return whether the bytes of ``segment`` (None: of the whole bucket) are the master's."""
        assert self.bucket is not None
        if segment is not None:
            return self.versions[segment.index] == segment.version()
        return self.versions == [each.version() for each in self.bucket.segments]

    def is_viewed(self) -> bool:
        """Return whether any tensor besides the engine's own uses this memory."""
        return self._use_count() > self._idle_count

    def _use_count(self) -> int:
        return torch._C._storage_Use_Count(self.storage._cdata)


class SlotPool:
    """Slots made on demand and reused."""

    def __init__(self, transfer: Transfer) -> None:
        self._transfer = transfer
        self._free: list[Slot] = []
        self.allocated_bytes = 0

    def acquire(self, nbytes: int, *, is_kept: bool = False) -> Slot:
        """Return a slot of at least ``nbytes``: the smallest free one that suits, or a new one.

        One that is kept has no byte more than it needs: it is not there for others later.
        """
        largest = rounded(nbytes) if is_kept else largest_reused(nbytes)
        suits = [slot for slot in self._free if nbytes <= slot.capacity_bytes <= largest]
        if suits:
            slot = min(suits, key=lambda candidate: candidate.capacity_bytes)
            self._free.remove(slot)
            return slot
        slot = Slot(self._transfer, rounded(nbytes))
        self.allocated_bytes += slot.capacity_bytes
        return slot

    def take_back(self, bucket: Bucket) -> Slot | None:
        """Return the free slot that still holds what the bucket's masters hold, if there is one."""
        for slot in self._free:
            if slot.bucket is bucket and slot.is_current():
                self._free.remove(slot)
                return slot
        return None

    def forget_contents(self, *, but_frozen: bool = False) -> None:
        """Let nobody take a free slot back: masters may change now without leaving a trace.

        ``but_frozen``: those of frozen parameters only do not.
        """
        for slot in self._free:
            if not (but_frozen and slot.bucket is not None and slot.bucket.is_constant()):
                slot.bucket = None

    def release(self, slot: Slot) -> None:
        """Take a slot back that nobody views."""
        self._transfer.retire(slot.lease)
        self._free.append(slot)

    def trim(self, limit_bytes: int) -> None:
        """Give free slots back to the allocator until at most ``limit_bytes`` are free.

        Smallest first: the largest ones, those of whole blocks, stay where they are from step to step, which
        recorded CUDA graphs rely on.
        """
        free_bytes = sum(slot.capacity_bytes for slot in self._free)
        while self._free and free_bytes > limit_bytes:
            slot = min(self._free, key=lambda free: free.capacity_bytes)
            self._free.remove(slot)
            free_bytes -= slot.capacity_bytes
            self.allocated_bytes -= slot.capacity_bytes
            self._transfer.discard(slot.flat, slot.lease)


def largest_reused(nbytes: int) -> int:
    """Return the size of the largest free slot that is reused for ``nbytes``."""
    return max(2 * nbytes, _SMALL_BYTES)


def rounded(nbytes: int) -> int:
    """Return the size of a slot for ``nbytes``."""
    return -(-max(nbytes, 1) // _GRANULE_BYTES) * _GRANULE_BYTES
