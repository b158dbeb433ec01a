"""One block of a streamed model at run time: its bytes on the target and what stands in the module.

What this module does not do: it takes and gives no memory; ``streamer`` and ``stream_flow`` do.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from ..errors import RequestError
from .stream_blocks import BlockPlan, StreamEntry
from .stream_buffers import StreamPool, TargetBuffer
from .stream_masters import BlockMaster
from .weight_files import WeightFile

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


class StreamBlock:
    """One block, or the rim.

    Attributes:
        index: Place among the model's blocks; -1 for the rim.
        master: Its host bytes.
        buffer: Where it is on the target, or on its way to; None: nowhere.
        is_resident: Whether the buffer is its own, not a slot.
        is_bound: Whether objects over the target's bytes stand in the module. A resident block stays bound.
        depth: How many of its forwards run.
        changes: What differs from the master, by path.
    """

    def __init__(self, plan: BlockPlan, index: int, files: Sequence[WeightFile] = ()) -> None:
        self.plan = plan
        self.index = index
        self.master = BlockMaster(plan, files)
        self.entries = {entry.path: entry for entry in plan.entries}
        self.buffer: TargetBuffer | None = None
        self.is_resident = False
        self.is_bound = False
        self.depth = 0
        self.changes: dict[str, WeightChange] = {}
        self._bound: Binding = []

    @property
    def is_filled(self) -> bool:
        """Whether its bytes are on the target, or on their way."""
        return self.buffer is not None and self.buffer.master is self.master

    def hold_now(self, pool: StreamPool) -> None:
        """Be on the target to stay, up to date, before anything runs."""
        if self.buffer is None:
            self.buffer = TargetBuffer(pool.transfer, self.master.nbytes)
            self.is_resident = True
        if not self.is_filled:
            pool.copy_in(self.master, self.buffer)
        pool.transfer.wait(self.buffer.lease)
        self.bind()
        self.apply_changes(pool)

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

    def apply_changes(self, pool: StreamPool) -> None:
        """Make the bound tensors what ``changes`` asks for, from what they are."""
        buffer = self.buffer
        assert buffer is not None
        if buffer.applied is self.changes:
            return
        for path, key in list(buffer.changed.items()):
            wanted = self.changes.get(path)
            if wanted is None or wanted.key != key:
                self._stand(self.entries[path], None)
                pool.restore(buffer, self.entries[path])
        for path, change in self.changes.items():
            if path not in buffer.changed:
                self._apply(self.entries[path], change, buffer)
        buffer.applied = self.changes

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


def check_known(changes: Mapping[str, WeightChange], blocks: Sequence[StreamBlock]) -> None:
    """Check that every change is one of a tensor of the blocks.

    Raises:
        RequestError: If a path names none.
    """
    unknown = sorted(set(changes).difference(*(block.entries for block in blocks)))
    if unknown:
        raise RequestError(
            f"changes of {unknown[:5]} were asked",
            limit="The model has no tensors of these names",
            way_out="Use names from its state_dict",
        )
