"""Target memory of streamed models, and what several models share: slots, host memory, budget.

What this module does not do: it decides neither which block moves nor when; ``streamer`` does.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from .leases import Lease
from .pinned_arena import PinnedArena
from .segments import align
from .stream_config import StreamConfig, ram_too_small
from .stream_masters import BlockMaster
from .stream_staging import Staging
from .transfer import Transfer, make_transfer

if TYPE_CHECKING:
    from .stream_blocks import StreamEntry
    from .streamer import ModelStreamer

_NUM_STAGING = 2

Binding = list[tuple["StreamEntry", torch.Tensor]]


class TargetBuffer:
    """A flat piece of target memory that holds one block, or a part of it.

    Attributes:
        flat: The memory, uint8.
        first: The byte of the block with which the part begins that this is for.
        stop: Where that part ends.
        master: Whose bytes are in it, or None.
        changed: Path of each tensor whose bytes are no longer the master's, with what changed it.
        replaced: Path of each tensor for which an object of its own stands, with that object.
        applied: The table of changes that the bytes are up to date with, if any.
    """

    def __init__(
        self, transfer: Transfer, nbytes: int, *, first: int = 0, lease: Lease | None = None
    ) -> None:
        self.first = first
        self.stop = first + nbytes
        self.flat = transfer.allocate(max(nbytes, 1))
        self.storage = self.flat.untyped_storage()
        if lease is not None:
            # A copy to any of the memory of this lease comes after all that runs in this one until now.
            transfer.retire(lease)
        self.lease = lease or transfer.open_lease()
        self.master: BlockMaster | None = None
        self.changed: dict[str, object] = {}
        self.replaced: dict[str, torch.Tensor] = {}
        self.applied: object | None = None
        self._views: dict[int, tuple[int, int, Binding]] = {}

    @property
    def nbytes(self) -> int:
        """Size of the memory."""
        return self.flat.numel()

    def views(self, master: BlockMaster) -> Binding:
        """Return the objects that stand for the part's tensors while they are here; made once."""
        known = self._views.get(id(master))
        if known is None or known[:2] != (self.first, self.stop):
            made = master.views(self.storage, self.first, self.stop)
            known = self._views[id(master)] = (self.first, self.stop, made)
        return known[2]

    def forget_views(self) -> None:
        """Make the objects anew when they are asked for next."""
        self._views.clear()

    def forget_content(self) -> None:
        """Note that the bytes are no block's any more, or a block's as it is on the host."""
        self.master = None
        self.applied = None
        self.changed.clear()
        self.replaced.clear()


def _resident_bytes(members: Sequence[ModelStreamer]) -> int:
    return sum(member.resident_bytes for member in members)


class StreamPool:
    """What the models of one budget share; at most one of them computes at a time.

    Args:
        device: Where they compute.
        config: The budget.
        reserve: Gives host memory for weights; None: memory of this process alone.

    Attributes:
        transfer: Does the copies.
        owner: The model that computes, or did last; the slots count as its.
    """

    def __init__(
        self,
        device: torch.device,
        config: StreamConfig,
        *,
        reserve: Callable[[int], mmap.mmap] | None = None,
    ) -> None:
        self.device = device
        self.config = config
        self._reserve = reserve
        self.transfer = make_transfer(device)
        self.owner: weakref.ref[ModelStreamer] | None = None
        self.host_bytes = 0
        self._members: weakref.WeakSet[ModelStreamer] = weakref.WeakSet()
        self._arenas: list[weakref.ref[PinnedArena]] = []
        self._slots: list[TargetBuffer] = []
        self._free: list[TargetBuffer] = []
        # Too small by now, but a block still computes from them.
        self._leaving: list[TargetBuffer] = []
        self._staging: list[Staging] = []

    @property
    def members(self) -> list[ModelStreamer]:
        """The models that share this."""
        return list(self._members)

    @property
    def slot_bytes(self) -> int:
        """Target memory of all slots."""
        return sum(slot.nbytes for slot in [*self._slots, *self._leaving])

    @property
    def pinned_bytes(self) -> int:
        """Host memory registered with CUDA."""
        return sum(arena.pinned_bytes for arena in (reference() for reference in self._arenas) if arena)

    def join(self, member: ModelStreamer) -> None:
        """Count a model in."""
        self._members.add(member)

    @property
    def num_slots(self) -> int:
        """How many slots there are, if any."""
        return self.config.prefetch_depth + 1

    def other_slot_bytes(self, member: ModelStreamer | None) -> int:
        """Return how large a slot has to be for the loaded models besides this one."""
        others = (other for other in self.members if other is not member and other.is_loaded)
        return max((other.slot_bytes for other in others), default=0)

    def make_way(self, member: ModelStreamer, target_bytes: int) -> int:
        """Let the other models give up what one is about to take, and return what it may take."""
        limit = self.config.vram_limit_bytes
        others = [other for other in self.members if other is not member]
        for other in others:
            other.forget_foreseen()
        if limit is None:
            return target_bytes
        for other in others:
            other.give_way(_resident_bytes(others) + min(target_bytes, limit) - limit)
        return max(min(target_bytes, limit - _resident_bytes(others)), member.least_bytes)

    def place(
        self, masters: Sequence[BlockMaster], when_moved: Callable[[torch.Tensor], None] | None = None
    ) -> PinnedArena | None:
        """Move blocks into the arena as far as the RAM limit goes; the rest stays in its file.

        Args:
            masters: The blocks.
            when_moved: Called with every tensor once its bytes have moved.

        Raises:
            RequestError: If more than the limit is in memory already, and in no file.
        """
        limit = self.config.ram_limit_bytes
        loose = {id(master): master.loose_bytes for master in masters}
        used_bytes = self.host_bytes + sum(loose.values())
        if limit is not None and used_bytes > limit:
            raise ram_too_small(limit, used_bytes, sum(loose.values()))
        chosen: list[BlockMaster] = []
        for master in masters:
            added_bytes = align(master.nbytes) - loose[id(master)]
            if limit is None or used_bytes + added_bytes <= limit:
                chosen.append(master)
                used_bytes += added_bytes
        self.host_bytes += sum(align(master.nbytes) for master in chosen)
        if not chosen:
            return None
        arena = PinnedArena(
            [master.nbytes for master in chosen], pin=self.device.type == "cuda", reserve=self._reserve
        )
        self._arenas.append(weakref.ref(arena))
        for master in chosen:
            master.move_into(arena.allocate(master.nbytes), when_moved)
        arena.seal()
        return arena

    def release_host(self, nbytes: int) -> None:
        """Note that a model gave host memory back."""
        self.host_bytes -= nbytes

    def settle_slots(self, slot_bytes: int) -> None:
        """Have all slots, each of exactly this size; none if it is 0.

        One from which a block computes now goes when that is over.
        """
        if slot_bytes == (self._slots[0].nbytes if self._slots else 0):
            return
        self.reclaim_slots()
        for slot in self._slots:
            if any(slot is free for free in self._free):
                self.transfer.discard(slot.flat, slot.lease)
            else:
                self._leaving.append(slot)
        self._slots, self._free = [], []
        if slot_bytes:
            self._slots = [TargetBuffer(self.transfer, slot_bytes) for _ in range(self.num_slots)]
            self._free = list(self._slots)

    def take_slot(self, first: int, stop: int) -> TargetBuffer | None:
        """Return a free slot for a part of a block, or None."""
        if not self._free or self._free[0].nbytes < stop - first:
            return None
        slot = self._free.pop(0)
        slot.first, slot.stop = first, stop
        return slot

    def return_slot(self, slot: TargetBuffer) -> None:
        """Take a slot back; everything launched so far was the last use of it."""
        self.transfer.retire(slot.lease)
        slot.forget_content()
        if any(slot is known for known in self._slots):
            self._free.append(slot)
        else:
            self._leaving = [other for other in self._leaving if other is not slot]
            self.transfer.discard(slot.flat, slot.lease)

    def reclaim_slots(self) -> None:
        """Take back every slot that a model took ahead of its use."""
        for member in self.members:
            member.forget_foreseen()

    def copy_in(self, master: BlockMaster, buffer: TargetBuffer) -> None:
        """Begin copying the part of a block that a buffer is for from the host to it."""
        first, stop = buffer.first, buffer.stop
        destination = buffer.flat[: stop - first]
        if master.host is not None:
            self.transfer.start(master.host[first:stop], destination, buffer.lease)
        elif master.is_borrowed:
            for source, target in master.copies(first, stop, destination):
                self.transfer.start(source, target, buffer.lease)
        else:
            staging = self._take_staging(stop - first)
            master.read_into(staging.memory, first, stop)
            self.transfer.start(staging.memory[: stop - first], destination, buffer.lease)
            staging.note_sent(getattr(self.transfer, "copy_stream", None))
        buffer.forget_content()
        buffer.master = master

    def restore(self, buffer: TargetBuffer, entry: StreamEntry) -> None:
        """Give one tensor in a buffer its master's bytes again; the current stream waits for them."""
        assert buffer.master is not None
        for index, (first, stop) in enumerate(buffer.master.spans(entry.tensor)):
            self.transfer.retire(buffer.lease)
            destination = buffer.flat[first - buffer.first : stop - buffer.first]
            for source, target in buffer.master.span_copies(entry.tensor, index, destination):
                self.transfer.start(source, target, buffer.lease)
            self.transfer.wait(buffer.lease)
        buffer.changed.pop(entry.path, None)
        buffer.replaced.pop(entry.path, None)

    def _take_staging(self, nbytes: int) -> Staging:
        if self._staging and self._staging[0].memory.numel() < nbytes:
            for staging in self._staging:
                staging.wait()
            self._staging = []
        if len(self._staging) < _NUM_STAGING:
            largest = max([nbytes, *(member.largest_block_bytes for member in self.members)])
            self._staging.append(Staging(self.transfer, largest))
            return self._staging[-1]
        staging = self._staging.pop(0)
        self._staging.append(staging)
        staging.wait()
        return staging
