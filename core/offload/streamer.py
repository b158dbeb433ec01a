"""Run a frozen model whose blocks stream through a budget of target memory.

Order of a block's forward: its copy is waited for (or started now, if nobody foresaw it), its tensors
in the module tree are replaced by objects over the target's bytes, the copies of the next blocks are
started, weight changes are applied, the forward runs, and the registered objects return. So outside
of a block's forward its tensors are the host masters, whole and unchanged, and ``state_dict`` is what
it always was. The rim's tensors are on the target from ``load`` to ``unload``.

A resident block gets its memory at ``load`` and its bytes when it is first used, by the same copies
that stream the others: there is no separate loading, also at a switch between models of one pool.

What this module does not do: no gradients (``manager`` does training), and it knows no LoRA: whoever
owns the model hands in ``WeightChange`` objects.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from ..errors import RequestError
from ..log import get_logger
from .stream_block import StreamBlock, WeightChange
from .stream_blocks import plan_blocks
from .stream_buffers import StreamPool, TargetBuffer
from .stream_config import budget_too_small
from .stream_flow import BlockFlow
from .stream_hooks import StreamHooks
from .stream_residents import choose_residents
from .stream_stats import PassClock, StreamStats, snapshot
from .weight_files import WeightFile

_LOG = get_logger("offload")


class ModelStreamer:
    """Streams one model.

    Args:
        root: The model; its tensors move into the pool's host memory now.
        pool: Budget, slots and copies, maybe shared with other models.
        entry: The module whose forward is one pass; None: the root.
        files: The files over which the model's tensors lie, if they do.

    Attributes:
        is_loaded: Whether it holds target memory and its hooks are on.

    Raises:
        RequestError: If a tensor cannot be streamed, or the budget holds too little to run at all.
    """

    def __init__(
        self,
        root: nn.Module,
        pool: StreamPool,
        *,
        entry: nn.Module | None = None,
        files: Sequence[WeightFile] = (),
    ) -> None:
        self.pool = pool
        self.is_loaded = False
        blocks, rim = plan_blocks(root)
        self._rim = StreamBlock(rim, -1, files)
        self._blocks = [StreamBlock(plan, index, files) for index, plan in enumerate(blocks)]
        self._check_budget(type(root).__name__)
        self._clock = PassClock(pool.device)
        self._flow = BlockFlow(self._blocks, pool, self._clock)
        self._hooks = StreamHooks(entry if entry is not None else root, self._blocks, self._flow, self._clock)
        pool.join(self)
        self._arena = pool.place([block.master for block in self._all])

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return sum(block.master.nbytes for block in self._all)

    @property
    def rim_bytes(self) -> int:
        """Bytes of what is outside the blocks."""
        return self._rim.master.nbytes

    @property
    def largest_block_bytes(self) -> int:
        """Bytes of the largest block."""
        return max((block.master.nbytes for block in self._blocks), default=0)

    @property
    def least_bytes(self) -> int:
        """Target memory without which the model cannot run: the rim and the slots, or all of it."""
        slots = self.pool.slots_needed_bytes(self.largest_block_bytes)
        return min(self.weight_bytes, self.rim_bytes + slots)

    @property
    def resident_bytes(self) -> int:
        """Target memory of the rim and of resident blocks."""
        return sum(block.buffer.nbytes for block in self._all if block.buffer and block.is_resident)

    @property
    def target_bytes(self) -> int:
        """Target memory held now; the pool's slots count for the model that was loaded last."""
        is_owner = self.pool.owner is not None and self.pool.owner() is self
        return self.resident_bytes + (self.pool.slot_bytes if is_owner else 0)

    def load(self, target_bytes: int) -> None:
        """Take target memory, hold the rim there, and choose the blocks that stay.

        Args:
            target_bytes: Most target memory for this model, slots included; less than ``least_bytes``
                counts as that. Other models of the pool give way within the pool's limit.
        """
        if not self.is_loaded:
            for block in self._all:
                block.master.take_back()
        target_bytes = self._make_way(max(target_bytes, self.least_bytes))
        self.pool.owner = weakref.ref(self)
        self._flow.forget_all()
        residents = self._choose(target_bytes - self.rim_bytes)
        for block in self._blocks:
            if block.index not in residents:
                self._drop(block)
        self._settle_slots(is_needed=len(residents) < len(self._blocks))
        self._load_rim()
        for index in sorted(residents):
            if not self._hold(self._blocks[index]):
                break
        if not self.is_loaded:
            self.is_loaded = True
            self._hooks.install()

    def shrink(self, free_bytes: int) -> int:
        """Give target memory of resident blocks back; they are streamed from now on.

        May be called between two blocks of a running pass.

        Returns:
            How many bytes were freed: at least ``free_bytes``, or all that could be.
        """
        if not self.is_loaded or free_bytes <= 0:
            return 0
        before = self.target_bytes
        held = self.resident_bytes - (self._rim.buffer.nbytes if self._rim.buffer else 0)
        if not self.pool.slot_bytes:
            held -= self.pool.slots_needed_bytes(self.largest_block_bytes)
        residents = choose_residents([block.master.nbytes for block in self._blocks], held - free_bytes)
        for block in self._blocks:
            if block.index not in residents and block.depth == 0:
                self._drop(block)
        self._settle_slots(is_needed=any(not block.is_resident for block in self._blocks))
        return max(0, before - self.target_bytes)

    def unload(self) -> None:
        """Give all target memory back; the model is its host masters again, without hooks."""
        if not self.is_loaded:
            return
        self.is_loaded = False
        self._hooks.remove()
        self._flow.forget_all()
        for block in self._all:
            block.unbind()
            self._drop(block)
            self._flow.let_go(block)
        self._settle_slots(is_needed=False)

    def close(self) -> None:
        """Unload, and unpin the host memory; the model keeps it as ordinary memory."""
        self.unload()
        self.pool.transfer.synchronize()
        if self._arena is not None:
            self.pool.release_host(self._arena.allocated_bytes)
            self._arena.unpin()
            self._arena = None

    def set_changes(self, changes: Mapping[str, WeightChange]) -> None:
        """Say how tensors differ from their masters from now on, by dotted path from the root.

        Nothing is reloaded: a resident tensor whose change is another one gets its own bytes again
        when it is next used, and the new change on top.

        Raises:
            RequestError: If a path names no tensor.
        """
        unknown = sorted(set(changes).difference(*(block.entries for block in self._all)))
        if unknown:
            raise RequestError(
                f"changes of {unknown[:5]} were asked",
                limit="The model has no tensors of these names",
                way_out="Use names from its state_dict",
            )
        for block in self._all:
            block.changes = {path: changes[path] for path in block.entries if path in changes}
        if self.is_loaded:
            self._rim.apply_changes(self.pool)

    def registered(self, path: str) -> torch.Tensor | None:
        """Return the model's own object of that path, whatever stands there now; over the host bytes."""
        for block in self._all:
            if path in block.entries:
                return block.entries[path].tensor
        return None

    def call_after_pass(self, function: Callable[[], None] | None) -> None:
        """Have a function called after every complete forward of the model, or no longer."""
        self._hooks.after_pass = function

    def forget_foreseen(self) -> None:
        """Give back every slot that this model took ahead of its use."""
        self._flow.forget_all()

    def stats(self) -> StreamStats:
        """Return what there is to know now."""
        return snapshot(
            self.pool,
            self._clock,
            masters=[(block.master.nbytes, block.master.host is not None) for block in self._all],
            residents=[block.is_resident for block in self._blocks],
            target_bytes=self.target_bytes,
        )

    @property
    def _all(self) -> list[StreamBlock]:
        return [self._rim, *self._blocks]

    @property
    def _others(self) -> list[ModelStreamer]:
        return [other for other in self.pool.members if other is not self]

    def _load_rim(self) -> None:
        rim = self._rim
        if rim.buffer is None:
            rim.buffer = TargetBuffer(self.pool.transfer, rim.master.nbytes)
            rim.is_resident = True
        if not rim.is_filled:
            self.pool.copy_in(rim.master, rim.buffer)
        self.pool.transfer.wait(rim.buffer.lease)
        rim.bind()
        rim.apply_changes(self.pool)

    def _hold(self, block: StreamBlock) -> bool:
        """Give a block memory to stay in; False if the target has none left."""
        if block.is_resident or block.depth:
            return True
        try:
            block.buffer = TargetBuffer(self.pool.transfer, block.master.nbytes)
        except torch.OutOfMemoryError:
            # Resident blocks are a cache: with fewer of them the model computes the same.
            _LOG.info("no memory for more resident blocks: %s and later ones stream", block.plan.path)
            self._settle_slots(is_needed=True)
            return False
        block.is_resident = True
        return True

    def _drop(self, block: StreamBlock) -> None:
        """Let a resident block's memory go."""
        if block.is_resident and block.buffer is not None:
            self.pool.transfer.discard(block.buffer.flat, block.buffer.lease)
            block.buffer, block.is_resident = None, False
            self._flow.forget(block)

    def _settle_slots(self, *, is_needed: bool) -> None:
        if is_needed:
            self.pool.open_slots(self.largest_block_bytes)
        elif not any(member.is_loaded for member in self._others):
            self.pool.close_slots()

    def _choose(self, capacity_bytes: int) -> set[int]:
        sizes = [block.master.nbytes for block in self._blocks]
        if sum(sizes) > capacity_bytes:
            capacity_bytes -= self.pool.slots_needed_bytes(self.largest_block_bytes)
        return choose_residents(sizes, capacity_bytes)

    def _check_budget(self, name: str) -> None:
        limit = self.pool.config.vram_limit_bytes
        least = self.least_bytes + sum(member.rim_bytes for member in self.pool.members)
        if limit is not None and least > limit:
            raise budget_too_small(name, self.pool.config, self.weight_bytes, least)

    def _make_way(self, target_bytes: int) -> int:
        """Let the other models of the pool give up what this one is about to take.

        Returns:
            What it may take.
        """
        limit = self.pool.config.vram_limit_bytes
        for other in self._others:
            other.forget_foreseen()
        if limit is None:
            return target_bytes
        for other in self._others:
            other.shrink(self._held_by_others() + min(target_bytes, limit) - limit)
        return max(min(target_bytes, limit - self._held_by_others()), self.least_bytes)

    def _held_by_others(self) -> int:
        return sum(member.resident_bytes for member in self._others)
