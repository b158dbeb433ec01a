"""One block of a streamed model at run time: what of it stays on the target, and what streams.

What this module does not do: it decides neither how much stays nor when something moves;
``stream_arrangement`` and ``stream_flow`` do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ..errors import RequestError
from .mapped_file import MappedFile
from .stream_blocks import BlockPlan
from .stream_buffers import StreamPool
from .stream_masters import BlockMaster
from .stream_part import StreamPart, WeightChange
from .transfer import Transfer

_MAX_HELD_PARTS = 4


class StreamBlock:
    """One block, or the rim: parts that stay on the target, and a rest that streams.

    Args:
        plan: The block.
        index: Place among the model's blocks; -1 for the rim.
        files: Files over which its tensors may lie.
        is_divided: Whether a part of it may stay; else all or nothing.

    Attributes:
        master: Its host bytes.
        cuts: How much of it may stay, from 0 to its size.
        held: The parts that stay, from the block's start on; a bound one stays bound.
        rest: What streams; None if everything stays. Its buffer is a slot.
        depth: How many of its forwards run.
        changes: What differs from the master, by path.
    """

    def __init__(
        self, plan: BlockPlan, index: int, files: Sequence[MappedFile] = (), *, is_divided: bool = False
    ) -> None:
        self.plan = plan
        self.index = index
        self.master = BlockMaster(plan, files)
        self.cuts = self.master.cuts() if is_divided else [0, self.master.nbytes]
        self.entries = {entry.path: entry for entry in plan.entries}
        self.held: list[StreamPart] = []
        self.rest: StreamPart | None = StreamPart(self.master, 0, self.master.nbytes)
        self.depth = 0
        self.changes: dict[str, WeightChange] = {}

    @property
    def is_resident(self) -> bool:
        """Whether all of it stays."""
        return self.rest is None

    @property
    def held_bytes(self) -> int:
        """Target memory of what stays."""
        return sum(part.buffer.nbytes for part in self.held if part.buffer is not None)

    @property
    def kept_bytes(self) -> int:
        """How many of its first bytes stay."""
        return self.held[-1].stop if self.held else 0

    @property
    def parts(self) -> list[StreamPart]:
        """What stays, and the rest."""
        return self.held if self.rest is None else [*self.held, self.rest]

    @property
    def is_filled(self) -> bool:
        """Whether all bytes are on the target, or on their way."""
        return all(part.is_filled for part in self.parts)

    @property
    def is_bound(self) -> bool:
        """Whether objects over the target's bytes stand in the module for all tensors."""
        return all(part.is_bound for part in self.parts)

    def keep(self, nbytes: int, transfer: Transfer) -> None:
        """Let the first ``nbytes``, one of ``cuts``, stay; the rest must have no slot now.

        What stays already is not moved; what is new gets its bytes when it is first used.

        Raises:
            torch.OutOfMemoryError: If the target has too little memory. What fitted stays.
        """
        while self.held and self.held[-1].stop > nbytes:
            self._drop(self.held.pop(), transfer)
        try:
            for stop in self._new_ends(nbytes):
                # One lease for all that stays: its copies follow one another, and are waited for as one.
                first_buffer = self.held[0].buffer if self.held else None
                part = StreamPart(self.master, self.kept_bytes, stop)
                part.buffer = part.new_buffer(transfer, first_buffer.lease if first_buffer else None)
                self.held.append(part)
        finally:
            self._settle_rest()

    def release(self, transfer: Transfer) -> None:
        """Let nothing stay; the rest must have no slot now."""
        while self.held:
            self._drop(self.held.pop(), transfer)
        self._settle_rest()

    def hold_now(self, pool: StreamPool) -> None:
        """Be on the target to stay, up to date, before anything runs."""
        self.keep(self.master.nbytes, pool.transfer)
        self.fill(pool)
        self.unbind()  # somebody may have put the registered objects back meanwhile
        self.bind(pool.transfer)
        self.apply_changes(pool)

    def fill(self, pool: StreamPool) -> None:
        """Begin the copies of what is not on the target; the rest has a buffer by now."""
        for part in self.parts:
            if not part.is_filled:
                assert part.buffer is not None
                pool.copy_in(self.master, part.buffer)

    def bind(self, transfer: Transfer) -> None:
        """Wait for the copies and put objects over the target's bytes in the registered ones' place."""
        for part in self.held[:1] if self.rest is None else [*self.held[:1], self.rest]:
            assert part.buffer is not None
            transfer.wait(part.buffer.lease)
        for part in self.parts:
            if not part.is_bound:
                part.bind()

    def bring_back(self) -> None:
        """Undo what somebody else moved meanwhile (``module.to``): of the master, and of what stays bound."""
        for part in self.parts:
            part.rebind_moved()
        self.master.take_back()

    def unbind_rest(self) -> None:
        """Put the registered objects back where they stream."""
        if self.rest is not None:
            self.rest.unbind()

    def unbind(self) -> None:
        """Put all registered objects back."""
        for part in self.parts:
            part.unbind()

    def apply_changes(self, pool: StreamPool) -> None:
        """Make the bound tensors what ``changes`` asks for."""
        for part in self.parts:
            part.apply_changes(pool, self.changes, self.entries)

    def _new_ends(self, nbytes: int) -> Iterator[int]:
        """Yield where the parts end that are missing; few of them, since each is an allocation."""
        reached, size = self.kept_bytes, self.master.nbytes
        if size == 0 and not self.held:
            yield 0
        for stop in self.cuts:
            if reached < stop <= nbytes and (stop == nbytes or stop - reached >= size / _MAX_HELD_PARTS):
                yield stop
                reached = stop

    def _drop(self, part: StreamPart, transfer: Transfer) -> None:
        part.unbind()
        if part.buffer is not None:
            transfer.discard(part.buffer.flat, part.buffer.lease)
            part.buffer = None

    def _settle_rest(self) -> None:
        assert self.rest is None or self.rest.buffer is None
        kept, size = self.kept_bytes, self.master.nbytes
        if kept == size and self.held:
            self.rest = None
        elif self.rest is None or self.rest.first != kept:
            self.rest = StreamPart(self.master, kept, size)


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
