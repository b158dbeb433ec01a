"""A part of one block of a streamed model at run time: its bytes on the target, what stands in the module.

What this module does not do: it takes and gives no memory; ``stream_block`` does.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from .leases import Lease
from .stream_blocks import StreamEntry
from .stream_buffers import StreamPool, TargetBuffer
from .stream_masters import BlockMaster
from .transfer import Transfer
from .wrappers import take_apart

if TYPE_CHECKING:
    from .stream_buffers import Binding


@dataclass(frozen=True)
class WeightChange:
    """How a tensor differs from its master while the model runs.

    Attributes:
        key: Equal for two changes that give the same result.
        apply: Takes the tensor on the target; returns the changed one, which may be of another type
            (it then stands in the module for the time being). It must not write to its argument.
    """

    key: Hashable
    apply: Callable[[torch.Tensor], torch.Tensor]


class StreamPart:
    """A run of one block's bytes: where it is on the target, and what stands in the module then.

    Args:
        master: The block's host bytes.
        first: Where the run begins in them; no tensor lies across either end.
        stop: Where it ends.

    Attributes:
        buffer: Where it is, or on its way to; None: nowhere.
        is_bound: Whether objects over the target's bytes stand in the module.
    """

    def __init__(self, master: BlockMaster, first: int, stop: int) -> None:
        self.master = master
        self.first = first
        self.stop = stop
        self.buffer: TargetBuffer | None = None
        self.is_bound = False
        self._paths = master.paths(first, stop)
        self._bound: Binding = []

    @property
    def nbytes(self) -> int:
        """Its length."""
        return self.stop - self.first

    @property
    def is_filled(self) -> bool:
        """Whether its bytes are on the target, or on their way."""
        return self.buffer is not None and self.buffer.master is self.master

    def new_buffer(self, transfer: Transfer, lease: Lease | None = None) -> TargetBuffer:
        """Return target memory for it alone, with a lease of its own unless one is given."""
        return TargetBuffer(transfer, self.nbytes, first=self.first, lease=lease)

    def bind(self) -> None:
        """Put objects over the target's bytes in the place of the registered ones."""
        assert self.buffer is not None
        if self._bound:
            self.unbind()  # what an interrupt left half-way
        for entry, view in self.buffer.views(self.master):
            # What the forward itself assigned (a cached table) is not ours to touch.
            if entry.table.get(entry.name) is entry.tensor:
                stand_in = self.buffer.replaced.get(entry.path, view)
                entry.table[entry.name] = stand_in
                self._bound.append((entry, stand_in))
        self.is_bound = True

    def unbind(self) -> None:
        """Put the registered objects back."""
        self.is_bound = False
        for entry, stand_in in self._bound:
            if entry.table.get(entry.name) is stand_in:
                entry.table[entry.name] = entry.tensor
        self._bound = []

    def rebind_moved(self) -> None:
        """Make objects over the target's bytes anew if the data of those that stand there was moved away."""
        if self.buffer is None or not self.is_bound:
            return
        own = self.buffer.storage.data_ptr()
        views = [view for _, view in self.buffer.views(self.master)]
        leaves = [leaf for view in views for leaf in take_apart(view)[0] if leaf.numel()]
        if any(leaf.untyped_storage().data_ptr() != own for leaf in leaves):
            self.buffer.forget_views()
            self.unbind()
            self.bind()

    def apply_changes(
        self, pool: StreamPool, changes: Mapping[str, WeightChange], entries: Mapping[str, StreamEntry]
    ) -> None:
        """Make the bound tensors what ``changes`` asks for, from what they are."""
        buffer = self.buffer
        assert buffer is not None
        if buffer.applied is changes:
            return
        for path, key in list(buffer.changed.items()):
            wanted = changes.get(path)
            if wanted is None or wanted.key != key:
                self._stand(entries[path], None)
                pool.restore(buffer, entries[path])
        for path, change in changes.items():
            if path in self._paths and path not in buffer.changed:
                self._apply(entries[path], change, buffer)
        buffer.applied = changes

    def _apply(self, entry: StreamEntry, change: WeightChange, buffer: TargetBuffer) -> None:
        current = entry.table[entry.name]
        with torch.no_grad():
            result = change.apply(current)
            # Noted first: if this is interrupted half-way, the bytes count as changed.
            buffer.changed[entry.path] = change.key
            is_plain = type(current) in (torch.Tensor, nn.Parameter)
            if is_plain and result.dtype == current.dtype and result.shape == current.shape:
                current.detach().copy_(result)
            else:
                buffer.replaced[entry.path] = result
                self._stand(entry, result)

    def _stand(self, entry: StreamEntry, stand_in: torch.Tensor | None) -> None:
        """Let another object stand for a bound tensor; None: the one over the buffer's bytes."""
        assert self.buffer is not None
        if stand_in is None:
            stand_in = next(view for each, view in self.buffer.views(self.master) if each is entry)
        for index, (bound, _) in enumerate(self._bound):
            if bound.tensor is entry.tensor:
                bound.table[bound.name] = stand_in
                self._bound[index] = (bound, stand_in)
