"""Run a frozen model whose blocks stream through a budget of target memory.

Order of a block's forward: its copy is waited for (or started now, if nobody foresaw it), its tensors
in the module tree are replaced by objects over the target's bytes, the copies of the next blocks are
started, weight changes are applied, the forward runs, and the registered objects return. So outside
of its forward a streamed block's tensors are the host masters, whole and unchanged. The rim's tensors are
on the target from ``load`` to ``unload``, and a resident block's from its first use on.

A resident block gets its memory at ``load`` and its bytes when it is first used, by the same copies
that stream the others: there is no separate loading, also at a switch between models of one pool.

Modulation layers may stand apart from their blocks (``stream_asides``): they stay only if everything
does, and otherwise come in once for all steps that a cache computes ahead.

What this module does not do: no gradients (``manager`` does training), and it knows no LoRA: whoever
owns the model hands in ``WeightChange`` objects.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..log import get_logger
from .modulation import ModulationCache
from .modulation_layers import ModulationPlan
from .stream_asides import StreamAsides, modulation_linears
from .stream_block import StreamBlock, WeightChange, check_known
from .stream_blocks import plan_blocks
from .stream_buffers import StreamPool, TargetBuffer
from .stream_config import budget_too_small
from .stream_flow import BeforePass, BlockFlow
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
        modulation: Layers of the entry module that stand apart, for a cache to serve; its limit is not used.
        when_moved: Called with every tensor of the model once its bytes have moved.
        borrows: Whether the tensors stay where they are, in host memory that the caller keeps and pins.

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
        modulation: ModulationPlan | None = None,
        when_moved: Callable[[torch.Tensor], None] | None = None,
        borrows: bool = False,
    ) -> None:
        self.pool = pool
        self.is_loaded = False
        entry = entry if entry is not None else root
        blocks, asides, rim = plan_blocks(root, modulation_linears(entry, modulation))
        self._clock = PassClock(pool.device)
        self._rim = StreamBlock(rim, -1, files)
        self._blocks = [StreamBlock(plan, index, files) for index, plan in enumerate(blocks)]
        self._asides = StreamAsides([StreamBlock(plan, -1, files) for plan in asides], pool, self._clock)
        self._check_budget(type(root).__name__)
        self._flow = BlockFlow(self._blocks, pool, self._clock)
        if modulation is not None:
            self._asides.make_cache(entry, modulation, self._flow.probing)
        self._hooks = StreamHooks(
            entry, self._blocks, asides=self._asides, flow=self._flow, clock=self._clock
        )
        pool.join(self)
        masters = [block.master for block in self._all]
        for master in masters:
            master.is_borrowed = borrows
        self._arena = None if borrows else pool.place(masters, when_moved)

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
        return min(self.weight_bytes, self.rim_bytes + self._asides.least_bytes + slots)

    @property
    def resident_bytes(self) -> int:
        """Target memory of the rim, of resident blocks, and of modulation layers and their outputs."""
        held = [
            block.buffer.nbytes for block in [self._rim, *self._blocks] if block.buffer and block.is_resident
        ]
        return sum(held) + self._asides.target_bytes

    @property
    def modulation(self) -> ModulationCache | None:
        """The cache of the modulation layers, if they stream now."""
        cache = self._asides.cache
        return cache if cache is not None and self.is_loaded and cache.is_active else None

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
        for block in self._all if not self.is_loaded else ():
            block.master.take_back()
        target_bytes = self.pool.make_way(self, max(target_bytes, self.least_bytes))
        self.pool.owner = weakref.ref(self)
        self._flow.forget_all()
        residents = self._choose(target_bytes)
        for block in (block for block in self._blocks if block.index not in residents):
            self._drop(block)
        self._settle_slots(is_needed=len(residents) < len(self._blocks))
        self._rim.hold_now(self.pool)
        self._asides.settle(is_resident=target_bytes >= self.weight_bytes)
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
        free_bytes -= self._asides.shrink()
        if free_bytes > 0:
            held = sum(block.buffer.nbytes for block in self._blocks if block.buffer and block.is_resident)
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
        self._asides.release()
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
        check_known(changes, self._all)
        with self._asides.noticing_changes():
            for block in self._all:
                block.changes = {path: changes[path] for path in block.entries if path in changes}
        if self.is_loaded:
            self._rim.apply_changes(self.pool)

    def registered(self, path: str) -> torch.Tensor | None:
        """Return the model's own object of that path, whatever stands there now; over the host bytes."""
        return next((block.entries[path].tensor for block in self._all if path in block.entries), None)

    def call_around_pass(
        self, *, before: BeforePass | None = None, after: Callable[[], None] | None = None
    ) -> None:
        """Have functions called before every forward (with it and its arguments) and after a whole one."""
        self._hooks.before_pass = before or self._hooks.before_pass
        self._hooks.after_pass = after or self._hooks.after_pass

    def run_pass(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run one pass by a method of the model that is not its forward, and return its result."""
        return self._hooks.run_pass(forward, args, kwargs)

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
        # The modulation layers last: they are what a RAM limit leaves in the file, being read least.
        return [self._rim, *self._blocks, *self._asides.blocks]

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
            block.unbind()
            self._flow.has_streamed = True
            self.pool.transfer.discard(block.buffer.flat, block.buffer.lease)
            block.buffer, block.is_resident = None, False
            self._flow.forget(block)

    def _settle_slots(self, *, is_needed: bool) -> None:
        if is_needed:
            self.pool.open_slots(self.largest_block_bytes)
        elif not any(member.is_loaded for member in self.pool.members if member is not self):
            self.pool.close_slots()

    def _choose(self, target_bytes: int) -> set[int]:
        sizes = [block.master.nbytes for block in self._blocks]
        if target_bytes >= self.weight_bytes:
            return set(range(len(sizes)))
        capacity_bytes = target_bytes - self.rim_bytes - self._asides.least_bytes
        if sum(sizes) > capacity_bytes:
            capacity_bytes -= self.pool.slots_needed_bytes(self.largest_block_bytes)
        return choose_residents(sizes, capacity_bytes)

    def _check_budget(self, name: str) -> None:
        limit = self.pool.config.vram_limit_bytes
        least = self.least_bytes + sum(member.rim_bytes for member in self.pool.members)
        if limit is not None and least > limit:
            raise budget_too_small(name, self.pool.config, self.weight_bytes, least)
