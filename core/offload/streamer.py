"""Run a frozen model whose blocks stream through a budget of target memory.

Order of a block's forward: its copy is waited for (or started now, if nobody foresaw it), its tensors
in the module tree are replaced by objects over the target's bytes, the copies of the next blocks are
started, weight changes are applied, the forward runs, and the registered objects return. So outside
of its forward a streamed block's tensors are the host masters, whole and unchanged. The rim's tensors are
on the target from ``load`` to ``unload``, and a resident block's from its first use on.

What stays of a block (``stream_residents``) gets its memory at ``load`` and its bytes when it is first
used, by the same copies that stream the rest: there is no separate loading, also at a switch between
models of one pool.

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

from .host_parts import HostParts
from .mapped_file import MappedFile
from .modulation import ModulationCache
from .modulation_layers import ModulationPlan
from .stream_arrangement import Arrangement
from .stream_asides import StreamAsides, modulation_linears
from .stream_block import StreamBlock, check_known
from .stream_blocks import plan_blocks
from .stream_buffers import StreamPool
from .stream_config import budget_too_small
from .stream_flow import BeforePass, BlockFlow
from .stream_hooks import StreamHooks
from .stream_part import WeightChange
from .stream_residents import least_needed
from .stream_stats import PassClock, StreamStats, snapshot


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
        parts: Those tensors that stand for parts of others; then all stay where they are.

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
        files: Sequence[MappedFile] = (),
        modulation: ModulationPlan | None = None,
        when_moved: Callable[[torch.Tensor], None] | None = None,
        borrows: bool = False,
        parts: HostParts | None = None,
    ) -> None:
        self.pool = pool
        self.is_loaded = False
        borrows = borrows or parts is not None
        entry = entry if entry is not None else root
        blocks, asides, rim = plan_blocks(root, modulation_linears(entry, modulation))
        self._clock = PassClock(pool.device)
        self._rim = StreamBlock(rim, -1, files)
        self._blocks = [StreamBlock(plan, index, files, is_divided=True) for index, plan in enumerate(blocks)]
        self._asides = StreamAsides([StreamBlock(plan, -1, files) for plan in asides], pool, self._clock)
        self._check_budget(type(root).__name__)
        self._flow = BlockFlow(self._blocks, pool, self._clock)
        own = weakref.ref(self)
        self._arrangement = Arrangement(self._blocks, self._flow, pool, lambda: pool.other_slot_bytes(own()))
        if modulation is not None:
            self._asides.make_cache(entry, modulation, self._flow.probing)
        self._hooks = StreamHooks(
            entry, self._blocks, asides=self._asides, flow=self._flow, clock=self._clock
        )
        masters = [block.master for block in self._all]
        for master in masters:
            master.is_borrowed = borrows
            master.parts = parts or master.parts
        self._arena = None if borrows else pool.place(masters, when_moved)
        pool.join(self)  # now that nothing is refused any more

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
        others = (other.largest_block_bytes for other in self.pool.members if other is not self)
        blocks_bytes = least_needed(
            [block.cuts for block in self._blocks], self.pool.num_slots, max(others, default=0)
        )
        return min(self.weight_bytes, self.rim_bytes + self._asides.least_bytes + blocks_bytes)

    @property
    def resident_bytes(self) -> int:
        """Target memory of the rim, of resident blocks, and of modulation layers and their outputs."""
        return self._rim.held_bytes + self._arrangement.held_bytes + self._asides.target_bytes

    @property
    def slot_bytes(self) -> int:
        """How large a slot has to be for what streams of this model."""
        return self._arrangement.slot_bytes

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
        """Take target memory, hold the rim there, and choose what stays of the blocks.

        Args:
            target_bytes: Most target memory for this model, slots included; less than ``least_bytes``
                counts as that. Other models of the pool give way within the pool's limit.
        """
        for block in self._all if not self.is_loaded else ():
            block.master.take_back()
        target_bytes = self.pool.make_way(self, max(target_bytes, self.least_bytes))
        self.pool.owner = weakref.ref(self)
        self._flow.forget_all()
        others_bytes = self.pool.num_slots * self.pool.other_slot_bytes(self)
        is_whole = target_bytes >= self.weight_bytes + others_bytes
        asides_bytes = self._asides.nbytes if is_whole else self._asides.least_bytes
        try:
            self._rim.hold_now(self.pool)
            self._asides.settle(is_resident=is_whole)
            self._arrangement.fit(target_bytes - self.rim_bytes - asides_bytes)
        except BaseException:
            self._release()
            raise
        if not self.is_loaded:
            self.is_loaded = True
            self._hooks.install()

    def bring_back(self) -> None:
        """Undo what somebody else moved of the loaded model's tensors meanwhile (``module.to``)."""
        for block in self._all:
            block.bring_back()

    def shrink(self, free_bytes: int) -> int:
        """Give target memory of what stays of the blocks back; it streams from now on.

        May be called between two blocks of a running pass.

        Returns:
            How many bytes were freed: at least ``free_bytes``, or all that could be.
        """
        if not self.is_loaded or free_bytes <= 0:
            return 0
        before = self.target_bytes
        free_bytes -= self._asides.shrink()
        if free_bytes > 0:
            self._arrangement.fit(self._arrangement.held_bytes + self.pool.slot_bytes - free_bytes)
        return max(0, before - self.target_bytes)

    def give_way(self, free_bytes: int) -> None:
        """Let that much less stay, or nothing but the rim, for another model of the pool."""
        if free_bytes > 0 and self.is_loaded:
            free_bytes -= self._asides.shrink()
            self._arrangement.give_way(self._arrangement.held_bytes - max(0, free_bytes))

    def unload(self) -> None:
        """Give all target memory back; the model is its host masters again, without hooks."""
        if self.is_loaded:
            self._release()

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

    def running(self, path: str) -> torch.Tensor | None:
        """Return a tensor on the target as the model computes with it; None if there is none of that path."""
        block = next((block for block in self._all if path in block.entries), None)
        if block is None:
            return None
        tensor = block.master.parts.filled(block.entries[path].tensor).to(self.pool.device)
        if path not in block.changes:
            return tensor
        with torch.no_grad():
            return block.changes[path].apply(tensor)

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
            rests=[block.rest.nbytes if block.rest is not None else 0 for block in self._blocks],
            target_bytes=self.target_bytes,
        )

    @property
    def _all(self) -> list[StreamBlock]:
        # The modulation layers last: they are what a RAM limit leaves in the file, being read least.
        return [self._rim, *self._blocks, *self._asides.blocks]

    def _release(self) -> None:
        self.is_loaded = False
        self._hooks.remove()
        self._flow.forget_all()
        self._rim.unbind()
        self._rim.release(self.pool.transfer)
        self._arrangement.release()
        self._asides.release()

    def _check_budget(self, name: str) -> None:
        limit = self.pool.config.vram_limit_bytes
        least = self.least_bytes + sum(member.rim_bytes for member in self.pool.members)
        if limit is not None and least > limit:
            raise budget_too_small(name, self.pool.config, self.weight_bytes, least)
