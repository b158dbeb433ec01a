"""When blocks move: around each block's forward, and ahead of it.

The order in which blocks run is learned from the pass before; until then it is the model's. A wrong
guess costs a copy, never a wrong number, since whatever runs is fetched by name.

What this module does not do: it chooses no residents and knows no budget; ``streamer`` does.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn

from ..module_hooks import Forward, ModuleHook
from .stream_block import StreamBlock
from .stream_buffers import StreamPool
from .stream_stats import PassClock

# Called with a pass's forward and its arguments.
BeforePass = Callable[[Forward, tuple, dict], None]


class BlockFlow:
    """Brings blocks in, in the order in which they run.

    Args:
        blocks: All blocks, in model order.
        pool: Slots and copies.
        clock: Learns of every wait.

    Attributes:
        has_streamed: Whether any block is not here to stay, or not here yet.
    """

    def __init__(self, blocks: Sequence[StreamBlock], pool: StreamPool, clock: PassClock) -> None:
        self._pool = pool
        self._clock = clock
        self._count = len(blocks)
        self._next = {block.index: blocks[(block.index + 1) % len(blocks)] for block in blocks}
        self._last: StreamBlock | None = None
        self._foreseen: list[StreamBlock] = []
        self._lingering: StreamBlock | None = None
        self._called: set[int] = set()
        self._is_probing = False
        self.has_streamed = True
        self._blocks = blocks

    @contextlib.contextmanager
    def probing(self) -> Iterator[None]:
        """Let passes that end early, one after the other, find their blocks where the last one had them.

        Nothing is learned of the order meanwhile.
        """
        before, self._is_probing = self._is_probing, True
        try:
            yield
        finally:
            self._is_probing = before

    def is_called(self, block: StreamBlock) -> bool:
        """Return whether the model has called the block itself, not only parts of it."""
        return block.index in self._called

    @contextlib.contextmanager
    def using(self, block: StreamBlock, *, is_part: bool = False) -> Iterator[None]:
        """Have the block's tensors on the target; whatever ends the forward, they return.

        Args:
            block: The block.
            is_part: Only a part of it is called. Its slot is then kept until another block needs one, for
                the parts that follow.
        """
        block.depth += 1
        if not is_part:
            self._called.add(block.index)
        try:
            if block.depth == 1:
                self._enter(block)
            yield
        finally:
            block.depth -= 1
            if block.depth == 0:
                block.unbind_rest()
                if is_part or self._is_probing:
                    self._lingering = block
                else:
                    self.let_go(block)

    def end_pass(self, *, is_complete: bool) -> None:
        """Note that a forward of the model is over; after a broken one nothing is learned from it."""
        if not is_complete:
            self._last = None
        self.has_streamed = any(not block.is_resident or not block.is_filled for block in self._blocks)

    def let_go(self, block: StreamBlock) -> None:
        """Give the block's slot back, if it has one."""
        if block.rest is not None and block.rest.buffer is not None:
            slot, block.rest.buffer = block.rest.buffer, None
            self._pool.return_slot(slot)

    def forget(self, block: StreamBlock) -> None:
        """Take back that the block's copy was started ahead."""
        if any(block is other for other in self._foreseen):
            self._foreseen = [other for other in self._foreseen if other is not block]
            if block.depth == 0:
                self.let_go(block)

    def forget_all(self) -> None:
        """Give back every slot that is not in use."""
        for block in list(self._foreseen):
            self.forget(block)
        if self._lingering is not None and self._lingering.depth == 0:
            self.let_go(self._lingering)
        self._lingering = None

    def _enter(self, block: StreamBlock) -> None:
        lingering, self._lingering = self._lingering, None
        if lingering is not None and lingering is not block and lingering.depth == 0:
            self.let_go(lingering)
        if not self._is_probing:
            if self._last is not None and self._last is not block:
                self._next[self._last.index] = block
            self._last = block
        if block.is_bound:
            block.bind(self._pool.transfer)  # waits, if this is the first time on this stream
        else:
            begin = self._clock.now()
            if not block.is_filled:
                self._start_now(block)
            self._foreseen = [other for other in self._foreseen if other is not block]
            block.bind(self._pool.transfer)
            self._clock.waited(begin, self._clock.now())
        if self.has_streamed:
            self._look_ahead(block)
        block.apply_changes(self._pool)

    def _start_now(self, block: StreamBlock) -> None:
        if not self._take_slot(block):
            self._pool.reclaim_slots()
            if not self._take_slot(block):
                # More blocks at once than there are slots: one runs inside another.
                assert block.rest is not None
                block.rest.buffer = block.rest.new_buffer(self._pool.transfer)
        block.fill(self._pool)

    def _take_slot(self, block: StreamBlock) -> bool:
        rest = block.rest
        if rest is not None and rest.buffer is None:
            rest.buffer = self._pool.take_slot(rest.first, rest.stop)
        return rest is None or rest.buffer is not None

    def _look_ahead(self, block: StreamBlock) -> None:
        expected = block
        for _ in range(self._count - 1):
            if len(self._foreseen) >= self._pool.config.prefetch_depth:
                return
            expected = self._next[expected.index]
            if expected is block:
                return
            if not expected.is_filled and not self._start_ahead(expected):
                return

    def _start_ahead(self, block: StreamBlock) -> bool:
        if not self._take_slot(block):
            return False
        begin = self._clock.now() if self._clock.copies_block else None
        block.fill(self._pool)
        if begin is not None:
            self._clock.waited(begin, self._clock.now())
        self._foreseen.append(block)
        return True


class BlockHook(ModuleHook):
    """Runs a block's forward with its tensors on the target."""

    def __init__(self, flow: BlockFlow, block: StreamBlock) -> None:
        self._flow = weakref.ref(flow)
        self._block = block

    def run(self, forward: Forward, module: nn.Module, args: tuple, kwargs: dict) -> Any:
        """Call the forward."""
        flow = self._flow()
        if flow is None:
            return forward(*args, **kwargs)
        with flow.using(self._block):
            return forward(*args, **kwargs)


class PartHook(ModuleHook):
    """Serves a block whose parts are called without it: a loop over its layers, a method of its own."""

    def __init__(self, flow: BlockFlow, block: StreamBlock) -> None:
        self._flow = weakref.ref(flow)
        self._block = block

    def run(self, forward: Forward, module: nn.Module, args: tuple, kwargs: dict) -> Any:
        """Call the forward."""
        flow = self._flow()
        if flow is None or self._block.depth:
            return forward(*args, **kwargs)
        with flow.using(self._block, is_part=True):
            return forward(*args, **kwargs)


class PassHook(ModuleHook):
    """Measures the model's forward, and calls others before and after it."""

    def __init__(
        self, flow: BlockFlow, clock: PassClock, before_pass: BeforePass, after_pass: Callable[[], None]
    ) -> None:
        self._flow = flow
        self._clock = clock
        self._before_pass = before_pass
        self._after_pass = after_pass

    def run(self, forward: Forward, module: nn.Module, args: tuple, kwargs: dict) -> Any:
        """Call the forward."""
        is_complete = False
        self._before_pass(forward, args, kwargs)
        self._clock.begin_pass()
        try:
            output = forward(*args, **kwargs)
            is_complete = True
            return output
        finally:
            self._clock.end_pass(is_complete=is_complete)
            self._flow.end_pass(is_complete=is_complete)
            if is_complete:
                self._after_pass()
