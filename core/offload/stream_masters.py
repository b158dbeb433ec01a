"""The host bytes of one block: side by side in the arena, or left in the file that they came from.

What this module does not do: it decides neither where a block lies nor when it moves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .host_parts import HostParts
from .host_runs import HostRun, add_run
from .mapped_file import MappedFile
from .pinned_arena import HostRegion
from .segments import (
    Layout,
    align,
    extent_bytes,
    group_overlapping,
    raw_bytes,
    view_of_storage,
)
from .stream_blocks import BlockPlan, StreamEntry
from .tensors import set_data
from .wrappers import take_apart

# A block is cut at about as many places at most.
_NUM_PARTS = 16

# (offset of the segment in the block's bytes, layout inside the segment)
Place = tuple[int, Layout]


class BlockMaster:
    """The bytes of one block's tensors and how the tensors lie in them.

    Args:
        plan: The block.
        files: Files over which tensors may lie; those are read from the file, not through its mapping.

    Attributes:
        nbytes: Length of all bytes, aligned.
        host: The bytes in the arena, uint8 ``[nbytes]``; None while they are still where they were.
        is_borrowed: Whether the bytes stay where they were, in memory that somebody else keeps and pins.
        parts: Of a borrowed block, whose tensors may stand for parts of others.
    """

    def __init__(self, plan: BlockPlan, files: Sequence[MappedFile] = ()) -> None:
        self.plan = plan
        self._files = files
        self.nbytes = 0
        self.host: torch.Tensor | None = None
        self.is_borrowed = False
        self.parts = HostParts()
        self._pieces: list[tuple[torch.Tensor, int]] | None = None
        self._cut: list[tuple[torch.Tensor, int]] = []
        self._objects = list({id(entry.tensor): entry.tensor for entry in plan.entries}.values())
        self._leaves: dict[int, list[torch.Tensor]] = {}
        self._places: dict[int, list[Place]] = {}
        self._extents: dict[int, tuple[int, int]] = {}
        self._segments: list[tuple[int, int]] = []
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._lay_out()

    def _lay_out(self) -> None:
        flat: list[tuple[int, torch.Tensor]] = []
        for tensor in self._objects:
            leaves = take_apart(tensor)[0]
            self._leaves[id(tensor)] = leaves
            flat.extend((id(tensor), leaf) for leaf in leaves)
        places: dict[int, Place] = {}
        for segment in group_overlapping([leaf for _, leaf in flat]):
            for index, layout in segment.layouts:
                places[index] = (self.nbytes, layout)
            self._segments.append((self.nbytes, segment.nbytes))
            self.nbytes += align(segment.nbytes)
        for index, (key, _) in enumerate(flat):
            self._places.setdefault(key, []).append(places[index])
        sizes = dict(self._segments)
        for key, own in self._places.items():
            stop = max(start + align(sizes[start]) for start, _ in own)
            self._extents[key] = (min(start for start, _ in own), stop)

    def move_into(self, region: HostRegion, when_moved: Callable[[torch.Tensor], None] | None = None) -> None:
        """Copy the bytes into the arena, tensor by tensor, and point the tensors there.

        Each tensor's old memory is let go before the next one is copied.

        Args:
            region: Where to.
            when_moved: Called with each tensor once it has moved.
        """
        self.host = region.tensor(0, self.nbytes)
        self._storages = {
            start: region.tensor(start, nbytes).untyped_storage() for start, nbytes in self._segments
        }
        for tensor in self._objects:
            leaves = self._leaves[id(tensor)]
            for leaf, (start, layout) in zip(leaves, self._places[id(tensor)], strict=True):
                self._read_leaf(leaf, self.host, start + layout.offset_bytes)
                set_data(leaf, layout.view(self._storages[start]))
            if when_moved is not None:
                when_moved(tensor)

    def take_back(self) -> None:
        """Make every registered object stand where it stood, over the arena's bytes.

        Whoever worked on the model meanwhile may have put an equal parameter in its place, or moved
        its bytes; they are copied back, in case they changed.
        """
        for entry in self.plan.entries:
            current = entry.table.get(entry.name)
            if current is not entry.tensor and is_same_memory(current, entry.tensor):
                entry.table[entry.name] = entry.tensor
        if self.host is None:
            return
        for tensor in self._objects:
            leaves = self._leaves[id(tensor)]
            for leaf, (start, layout) in zip(leaves, self._places[id(tensor)], strict=True):
                own = layout.view(self._storages[start])
                if leaf.numel() and leaf.data_ptr() != own.data_ptr():
                    with torch.inference_mode(False), torch.no_grad():
                        own.copy_(leaf)
                    set_data(leaf, own)

    @property
    def loose_bytes(self) -> int:
        """Bytes in ordinary memory, though the model comes from files; 0 if it does not."""
        if not self._files or self.host is not None:
            return 0
        leaves = [leaf for own in self._leaves.values() for leaf in own if leaf.device.type == "cpu"]
        return sum(extent_bytes(leaf) for leaf in leaves if not any(file.holds(leaf) for file in self._files))

    def cuts(self) -> list[int]:
        """Return where the block can be cut so that no tensor is in two parts, from 0 to its size.

        Parts smaller than a share of the block are not worth a cut of their own.
        """
        places, reached = [0], 0
        for first, stop in sorted(self._extents.values()):
            if reached <= first and first - places[-1] >= self.nbytes / _NUM_PARTS:
                places.append(first)
            reached = max(reached, stop)
        return [*places, self.nbytes] if self.nbytes else places

    def copies(
        self, first: int, stop: int, destination: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield what to copy for bytes ``first .. stop``, which cut no tensor, to be at ``destination``.

        As few pieces as possible, each a source where it is and its target. For a borrowed block, whose
        tensors do not move.
        """
        if self._pieces is None:
            runs: list[HostRun] = []
            for tensor in self._objects:
                leaves = self._leaves[id(tensor)]
                for leaf, (start, layout) in zip(leaves, self._places[id(tensor)], strict=True):
                    if self.parts.holds(leaf):
                        self._cut.append((leaf, start + layout.offset_bytes))
                    else:
                        add_run(runs, leaf, start + layout.offset_bytes)
            self._pieces = [(run.bytes, run.place) for run in runs]
        for piece, place in self._pieces:
            begin, end = max(first, place), min(stop, place + piece.numel())
            if begin < end:
                yield piece[begin - place : end - place], destination[begin - first : end - first]
        for leaf, place in self._cut:
            if first <= place < stop:
                yield from self.parts.copies(leaf, destination[place - first :][: extent_bytes(leaf)])

    def read_into(self, destination: torch.Tensor, first: int, stop: int) -> None:
        """Copy bytes ``first .. stop``, which cut no tensor, from where they are to host memory, uint8."""
        if self.host is not None:
            destination[: stop - first].copy_(self.host[first:stop])
            return
        for tensor in (one for one in self._objects if self._is_in(one, first, stop)):
            leaves = self._leaves[id(tensor)]
            for leaf, (start, layout) in zip(leaves, self._places[id(tensor)], strict=True):
                self._read_leaf(leaf, destination, start + layout.offset_bytes - first)

    def _read_leaf(self, leaf: torch.Tensor, destination: torch.Tensor, first: int) -> None:
        part = destination[first : first + extent_bytes(leaf)]
        if not part.numel() or any(file.read(leaf.data_ptr(), part) for file in self._files):
            return
        part.copy_(raw_bytes(leaf))

    def spans(self, tensor: torch.Tensor) -> Iterator[tuple[int, int]]:
        """Yield first and last byte (exclusive) of every part of a tensor, inside the block's bytes."""
        for leaf, (start, layout) in zip(self._leaves[id(tensor)], self._places[id(tensor)], strict=True):
            first = start + layout.offset_bytes
            yield first, first + extent_bytes(leaf)

    def span_copies(
        self, tensor: torch.Tensor, index: int, destination: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield what to copy for ``spans``' item of that index to be at ``destination``."""
        leaf = self._leaves[id(tensor)][index]
        if self.parts.holds(leaf):
            yield from self.parts.copies(leaf, destination)
        elif self.host is None:
            yield raw_bytes(leaf), destination
        else:
            first, stop = list(self.spans(tensor))[index]
            yield self.host[first:stop], destination

    def views(
        self, storage: torch.UntypedStorage, first: int, stop: int
    ) -> list[tuple[StreamEntry, torch.Tensor]]:
        """Return, for every entry in a part, an object like the registered one over other bytes.

        Args:
            storage: The part's bytes on any device.
            first: Where it begins in the block.
            stop: Where it ends.
        """
        made = {
            id(tensor): self._view(tensor, storage, first)
            for tensor in self._objects
            if self._is_in(tensor, first, stop)
        }
        return [(entry, made[id(entry.tensor)]) for entry in self.plan.entries if id(entry.tensor) in made]

    def paths(self, first: int, stop: int) -> frozenset[str]:
        """Return the paths of the entries in a part."""
        return frozenset(entry.path for entry in self.plan.entries if self._is_in(entry.tensor, first, stop))

    def _is_in(self, tensor: torch.Tensor, first: int, stop: int) -> bool:
        begin = self._extents[id(tensor)][0]
        # An empty tensor may lie at the very end.
        return first <= begin < stop or begin == stop == self.nbytes

    def _view(self, tensor: torch.Tensor, storage: torch.UntypedStorage, first: int) -> torch.Tensor:
        parts = [layout.view(storage, start - first) for start, layout in self._places[id(tensor)]]
        with torch.inference_mode(False):
            view: Any = take_apart(tensor)[1](parts)
            if isinstance(tensor, nn.Parameter):
                view = nn.Parameter(view, requires_grad=False)
                if not is_traceable_wrapper_subclass(tensor):
                    vars(view).update(vars(tensor))
        return view


def is_same_memory(tensor: Any, other: torch.Tensor) -> bool:
    """Return whether two objects are the same kind of tensor over the same bytes."""
    if type(tensor) is not type(other) or tensor.size() != other.size() or tensor.dtype != other.dtype:
        return False
    pairs = zip(take_apart(tensor)[0], take_apart(other)[0], strict=True)
    return all(one.data_ptr() == two.data_ptr() and one.stride() == two.stride() for one, two in pairs)


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return another object over the same bytes, a parameter if it is one; never an inference tensor."""
    leaves, rebuild = take_apart(tensor)
    with torch.inference_mode(False):
        parts = [
            view_of_storage(
                leaf.untyped_storage(), leaf.dtype, int(leaf.storage_offset()), leaf.size(), leaf.stride()
            )
            for leaf in leaves
        ]
        made: Any = rebuild(parts)
        if isinstance(tensor, nn.Parameter):
            made = nn.Parameter(made, requires_grad=False)
            if not is_traceable_wrapper_subclass(tensor):
                vars(made).update(vars(tensor))
    return made


def point_at(follower: torch.Tensor, leader: torch.Tensor) -> None:
    """Let ``follower`` use the bytes of ``leader``, its alias; its own are let go."""
    for one, two in zip(take_apart(follower)[0], take_apart(leader)[0], strict=True):
        set_data(one, two)
