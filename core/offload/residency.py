"""Which buckets are on the target: a software cache over slots.

A bucket that a forward uses is pinned. One that a recompute or a backward brought in stays cached,
least recently used out first, up to a limit; so recompute and backward share one copy. A bucket that
is *kept* stays from its first use on, beside that limit. A slot that somebody still views is never
reused: it is *held* until its last view is gone, and counted. A free slot that nothing has overwritten
since is taken back without a copy: a backward begins with the buckets that its forward used last.

What this module does not do: it binds no tensor and knows neither forwards nor graphs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

import torch

from .buckets import Bucket, Segment
from .slots import Slot, SlotPool
from .transfer import Transfer


class Residency:
    """Bring buckets in, keep them within the limit, drop them.

    Args:
        transfer: Does the copies.
        cache_limit_bytes: Limit for cached buckets and for free slots kept for reuse.

    Attributes:
        keeps_frozen: Whether a free slot may be taken back after a pass too, if it holds frozen parameters.
    """

    def __init__(self, transfer: Transfer, cache_limit_bytes: int) -> None:
        self.transfer = transfer
        self.pool = SlotPool(transfer)
        self.cache_limit_bytes = cache_limit_bytes
        self.resident_set_bytes = 0
        self.keeps_frozen = False
        self.peak_resident_bytes = 0
        self.kept_bytes = 0
        self._streamed_in_bytes = 0
        self._kept: dict[int, Bucket] = {}
        self._cached: OrderedDict[int, Bucket] = OrderedDict()
        self._held: list[Slot] = []
        self._by_address: dict[int, Slot] = {}
        self._spans: list[tuple[int, int]] = []

    @property
    def resident_bytes(self) -> int:
        """Managed bytes on the target now: the resident set, and every slot in use or still viewed."""
        self._sweep()
        return self.resident_set_bytes + self.kept_bytes + self._streamed_in_bytes

    def note_peak(self) -> None:
        """Record the present residency if it is the highest so far."""
        self.peak_resident_bytes = max(self.peak_resident_bytes, self.resident_bytes)

    def slot_at(self, address: int) -> Slot | None:
        """Return the slot in use, or still viewed, whose memory starts at ``address``."""
        return self._by_address.get(address)

    def is_in_a_slot(self, address: int) -> bool:
        """Return whether ``slot_at`` may know the memory that ``address`` points into."""
        for start, end in self._spans:
            if start <= address < end:
                return True
        return False

    def fetch(self, bucket: Bucket, segment: Segment | None = None) -> Slot:
        """Make the current content of ``segment`` (None: of the whole bucket) readable in a slot.

        It is readable on the current stream.
        """
        slot = bucket.slot
        if slot is not None and not bucket.is_bound and not slot.is_current(segment):
            self._let_go(bucket)
            slot = None
        if slot is None:
            slot = self._revive(bucket) or self._load(bucket)
            bucket.slot = slot
        self.transfer.wait(slot.lease)
        bucket.is_spent = False
        if id(bucket) in self._cached:
            self._cached.move_to_end(id(bucket))
        return slot

    def prefetch(self, bucket: Bucket) -> bool:
        """Start a bucket's copy ahead of its use, if it fits the limit beside all that is still needed.

        Returns:
            Whether it is in or on its way, or will be changed before it can be.
        """
        if bucket.slot is not None or (bucket.update is not None and not bucket.update.is_over):
            return True
        if bucket.is_kept:
            bucket.slot = self._load(bucket)
            return True
        self._sweep()
        for spent in [cached for cached in self._cached.values() if cached.is_spent]:
            if self._streamed_in_bytes + bucket.nbytes <= self.cache_limit_bytes:
                break
            if spent.slot is not None and not spent.slot.is_viewed():
                self.drop(spent)
        if self._streamed_in_bytes + bucket.nbytes > self.cache_limit_bytes:
            return False
        bucket.slot = self._revive(bucket) or self._load(bucket)
        bucket.is_spent = False
        self._cached[id(bucket)] = bucket
        return True

    def pin(self, bucket: Bucket) -> None:
        """Keep the bucket where it is until it is unpinned as often."""
        bucket.pins += 1
        self._cached.pop(id(bucket), None)

    def cache(self, bucket: Bucket) -> None:
        """Keep an unpinned bucket until others need the room."""
        if bucket.slot is not None and bucket.pins == 0 and not bucket.is_kept:
            self._cached[id(bucket)] = bucket
            self._cached.move_to_end(id(bucket))
            self._make_room(0)

    def set_kept(self, kept: Iterable[Bucket], *, cache_limit_bytes: int) -> None:
        """Keep exactly these buckets, with ``cache_limit_bytes`` as the room for all others.

        No forward and no backward may run.
        """
        chosen = {id(bucket): bucket for bucket in kept}
        for bucket in list(self._kept.values()):
            if id(bucket) not in chosen:
                self.stream(bucket)
        for bucket in chosen.values():
            self.keep(bucket)
        self.cache_limit_bytes = cache_limit_bytes
        self.drop_cached()

    def keep(self, bucket: Bucket) -> None:
        """Let an unpinned bucket stay on the target; it is brought in at its next use, if it is not there."""
        if not bucket.is_kept:
            self._let_go(bucket)
            bucket.is_kept = True
            self._kept[id(bucket)] = bucket

    def stream(self, bucket: Bucket) -> int:
        """Let a kept, unpinned bucket come and go again.

        Returns:
            How many bytes that frees.
        """
        if not bucket.is_kept:
            return 0
        freed = bucket.nbytes if bucket.slot is not None else 0
        bucket.is_kept = False
        del self._kept[id(bucket)]
        self._let_go(bucket)
        return freed

    def kept_buckets(self) -> list[Bucket]:
        """Return the buckets that stay, in the order in which that was decided."""
        return list(self._kept.values())

    def drop(self, bucket: Bucket) -> None:
        """Let go of the bucket's slot, unless it is kept."""
        if not bucket.is_kept:
            self._let_go(bucket)

    def _let_go(self, bucket: Bucket) -> None:
        slot = bucket.slot
        bucket.slot = None
        self._cached.pop(id(bucket), None)
        if slot is None:
            return
        if slot.is_viewed():
            self._held.append(slot)
        else:
            self._free(slot)

    def drop_cached(self) -> None:
        """Let go of everything that is not pinned."""
        for bucket in list(self._cached.values()):
            self.drop(bucket)
        self._sweep()
        self.pool.trim(self.cache_limit_bytes)

    def forget_contents(self) -> None:
        """Take nothing back from free slots: from here on masters may change without leaving a trace.

        Frozen parameters only stay known where ``keeps_frozen`` says that every change of them leaves one.
        """
        self.pool.forget_contents(but_frozen=self.keeps_frozen)

    def _load(self, bucket: Bucket) -> Slot:
        self._sweep()
        self._make_room(0 if bucket.is_kept else bucket.nbytes)
        slot = None if bucket.is_kept else self.pool.take_back(bucket)
        if slot is None:
            slot = self._acquire(bucket.nbytes, is_kept=bucket.is_kept)
            self._fill(slot, bucket)
        slot.is_kept = bucket.is_kept
        self._by_address[slot.address] = slot
        self._note_spans()
        self._count(slot, bucket.nbytes)
        self.note_peak()
        return slot

    def _fill(self, slot: Slot, bucket: Bucket) -> None:
        with bucket.host_lock:
            slot.note_content(bucket)
            # What an optimizer may change meanwhile is copied while the lock is held.
            is_staged = bucket.is_staged and bucket.is_constant()
            self.transfer.start(bucket.host, slot.flat[: bucket.nbytes], slot.lease, is_staged=is_staged)
            bucket.slot = slot  # before the lock is free: who changes masters waits for this copy

    def _acquire(self, nbytes: int, *, is_kept: bool) -> Slot:
        try:
            return self.pool.acquire(nbytes, is_kept=is_kept)
        except torch.OutOfMemoryError:
            # What is only kept for speed must not be the reason; if it was not, this raises again.
            self.drop_cached()
            self.pool.trim(0)
            return self.pool.acquire(nbytes, is_kept=is_kept)

    def _revive(self, bucket: Bucket) -> Slot | None:
        for slot in self._held:
            if slot.bucket is bucket and slot.is_kept == bucket.is_kept and slot.is_current():
                self._held.remove(slot)
                return slot
        return None

    def _make_room(self, nbytes: int) -> None:
        cached_bytes = sum(bucket.nbytes for bucket in self._cached.values())
        for bucket in list(self._cached.values()):
            if cached_bytes + nbytes <= self.cache_limit_bytes:
                return
            assert bucket.slot is not None
            if not bucket.slot.is_viewed():
                cached_bytes -= bucket.nbytes
                self.drop(bucket)

    def _sweep(self) -> None:
        for slot in [slot for slot in self._held if not slot.is_viewed()]:
            self._held.remove(slot)
            self._free(slot)

    def _free(self, slot: Slot) -> None:
        assert slot.bucket is not None
        self._count(slot, -slot.bucket.nbytes)
        del self._by_address[slot.address]
        self._note_spans()
        self.pool.release(slot)

    def _note_spans(self) -> None:
        self._spans = [(start, start + slot.capacity_bytes) for start, slot in self._by_address.items()]

    def _count(self, slot: Slot, nbytes: int) -> None:
        if slot.is_kept:
            self.kept_bytes += nbytes
        else:
            self._streamed_in_bytes += nbytes
