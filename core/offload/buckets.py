"""A bucket: tensors whose masters lie side by side in the arena and that move in one copy.

What this module does not do: it has no slot of its own; ``residency`` gives and takes it.
"""

from __future__ import annotations

import bisect
import threading
from typing import TYPE_CHECKING

import torch

from .segments import align
from .tensors import ManagedTensor

if TYPE_CHECKING:
    from .pinned_arena import HostRegion
    from .slots import Slot
    from .transfer import Transfer
    from .update_queue import QueuedStep


class Segment:
    """Bytes that one or several overlapping tensors share.

    Attributes:
        nbytes: Length.
        offset_bytes: Start inside the bucket.
        index: Place among the bucket's segments.
        host: The master, uint8 ``[nbytes]``, with a storage of its own.
        tensors: Who uses these bytes.
        bucket: The bucket that it is part of.
    """

    def __init__(self, nbytes: int, tensors: list[ManagedTensor]) -> None:
        self.nbytes = nbytes
        self.offset_bytes = 0
        self.index = 0
        self.tensors = tensors
        self.host = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.bucket: Bucket | None = None
        self._elsewhere: torch.Tensor | None = None

    def version(self) -> int:
        """Return a number that grows with every change of content that autograd knows of."""
        if len(self.tensors) == 1:
            return self.tensors[0].version()
        return sum(tensor.version() for tensor in self.tensors)

    def is_constant(self) -> bool:
        """Return whether only frozen parameters use it: nothing that a forward or an optimizer changes."""
        return all(
            not tensor.is_trainable and all(entry.is_parameter for entry in tensor.entries)
            for tensor in self.tensors
        )

    def on_device(self, device: torch.device) -> torch.Tensor:
        """Return these bytes on another device; the same copy for every tensor of the segment."""
        if self._elsewhere is None or self._elsewhere.device != device:
            with torch.inference_mode(False):
                self._elsewhere = self.host.to(device)
        return self._elsewhere


class Bucket:
    """Segments that move together.

    Attributes:
        name: For messages: the unit or tensor that it holds.
        segments: In the order of their bytes.
        host: All masters, uint8 ``[nbytes]``.
        slot: Where its bytes are on the target, or None.
        pins: How many running forwards need it there.
        is_bound: Whether its tensors point at the slot.
        host_lock: Held while the masters change in another thread, and while a copy of them is started.
        update: The optimizer's step of its masters that is still to come, after ``optimizer.step()``.
        is_kept: Whether it stays on the target between uses.
        is_spent: Whether its part of the running backward is over, as far as can be seen: its slot is
            the one to take for what comes next.
    """

    def __init__(self, name: str, segments: list[Segment]) -> None:
        self.name = name
        self.segments = segments
        self.nbytes = 0
        for index, segment in enumerate(segments):
            segment.index = index
            segment.offset_bytes = self.nbytes
            segment.bucket = self
            self.nbytes += align(segment.nbytes)
        self._offsets = [segment.offset_bytes for segment in segments]
        self.tensors = list({id(t): t for segment in segments for t in segment.tensors}.values())
        self.host = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.region: HostRegion | None = None
        self.slot: Slot | None = None
        self.pins = 0
        self.is_bound = False
        self.is_kept = False
        self.is_spent = False
        self.host_lock = threading.Lock()
        self.update: QueuedStep | None = None

    @property
    def is_staged(self) -> bool:
        """Whether its masters were meant to be pinned and could not be."""
        return self.region is not None and self.region.is_pageable

    def is_constant(self) -> bool:
        """Return whether all of its segments are."""
        return all(segment.is_constant() for segment in self.segments)

    def place(self, region: HostRegion) -> None:
        """Give the masters their memory."""
        self.region = region
        self.host = region.tensor(0, self.nbytes)
        for segment in self.segments:
            segment.host = region.tensor(segment.offset_bytes, segment.nbytes)

    def bind(self) -> None:
        """Point every tensor at the slot."""
        assert self.slot is not None
        for tensor in self.tensors:
            tensor.bind(self.slot.storage)
        self.is_bound = True

    def unbind(self, transfer: Transfer) -> None:
        """Point every tensor at its master, which first receives what was changed meanwhile."""
        assert self.slot is not None
        self.is_bound = False
        changed: dict[int, Segment] = {}
        replaced_segments: list[Segment] = []
        for tensor in self.tensors:
            for segment, replaced in tensor.unbind():
                if replaced is None:
                    changed[id(segment)] = segment
                else:
                    tensor.host_views[0].copy_(replaced)
                    tensor.generation += 1
                    replaced_segments.append(segment)
        for segment in changed.values():
            transfer.write_back(self._in_slot(segment), segment.host)
            self.slot.versions[segment.index] = segment.version()
        for segment in replaced_segments:
            self.slot.versions[segment.index] = None

    def segment_at(self, offset_bytes: int) -> Segment:
        """Return the segment that holds this byte of the bucket."""
        return self.segments[bisect.bisect_right(self._offsets, offset_bytes) - 1]

    def _in_slot(self, segment: Segment) -> torch.Tensor:
        assert self.slot is not None
        return self.slot.flat[segment.offset_bytes : segment.offset_bytes + segment.nbytes]
