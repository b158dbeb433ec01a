"""Two buffers through which a streamed model's modulation layers come in, one while another computes.

The copies of layers that are expected run ahead, in the order of the model. A wrong guess costs a copy,
never a wrong number: a layer that is called without having been foreseen gets a buffer all the same.

What this module does not do: it knows no cache, and it does not say which layers are needed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from .stream_block import StreamBlock
from .stream_buffers import StreamPool, TargetBuffer
from .stream_stats import PassClock

# As many as the transformers here have such layers in a block: both come in while the block before computes.
_NUM_BUFFERS = 2


class AsideBuffers:
    """The buffers of one model's modulation layers.

    Args:
        blocks: One for each layer.
        pool: Copies.
        clock: Learns of waits where a copy blocks.
    """

    def __init__(self, blocks: Sequence[StreamBlock], pool: StreamPool, clock: PassClock) -> None:
        self._largest_bytes = max((block.master.nbytes for block in blocks), default=0)
        self._count = min(_NUM_BUFFERS, len(blocks))
        self._pool = pool
        self._clock = clock
        self._all: list[TargetBuffer] = []
        self._free: list[TargetBuffer] = []
        self._foreseen: list[StreamBlock] = []
        self._coming: deque[StreamBlock] = deque()

    @property
    def nbytes(self) -> int:
        """Target memory held now."""
        return sum(buffer.nbytes for buffer in self._all)

    @property
    def needed_bytes(self) -> int:
        """Target memory of all buffers."""
        return self._count * self._largest_bytes

    def open(self) -> None:
        """Take the memory, unless it is there.

        Raises:
            torch.OutOfMemoryError: If there is none; what was taken is given back.
        """
        try:
            while len(self._all) < self._count:
                self._all.append(TargetBuffer(self._pool.transfer, self._largest_bytes))
                self._free.append(self._all[-1])
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give the memory back; no layer may be computing."""
        self._forget_foreseen()
        self._coming.clear()
        for buffer in self._all:
            self._pool.transfer.discard(buffer.flat, buffer.lease)
        self._all, self._free = [], []

    def expect(self, blocks: Sequence[StreamBlock]) -> None:
        """Say which layers will be called next, in this order, and start the first copies."""
        if self._foreseen != list(blocks[: len(self._foreseen)]):
            self._forget_foreseen()
        self._coming = deque(blocks[len(self._foreseen) :])
        self._look_ahead()

    def take(self, block: StreamBlock) -> None:
        """See to it that what streams of a layer has memory."""
        if block in self._foreseen:
            self._foreseen.remove(block)
            return
        if block.rest is None or block.rest.buffer is not None:
            return
        self._forget_foreseen()  # in another order than was thought
        if block in self._coming:
            self._coming.rotate(-self._coming.index(block))
            self._coming.popleft()
        if not self._free:
            block.rest.buffer = block.rest.new_buffer(self._pool.transfer)  # one runs inside another
        else:
            self._lend(block)

    def give_back(self, block: StreamBlock, *, goes_on: bool) -> None:
        """Take back the memory of a layer that has computed; if it goes on, start copies of those to come."""
        assert block.rest is not None
        buffer, block.rest.buffer = block.rest.buffer, None
        if buffer is None:
            return
        self._pool.transfer.retire(buffer.lease)
        if any(buffer is known for known in self._all):
            self._free.append(buffer)
        else:
            self._pool.transfer.discard(buffer.flat, buffer.lease)
        if goes_on:
            self._look_ahead()

    def _look_ahead(self) -> None:
        while self._coming and self._free:
            block = self._coming.popleft()
            if block.depth or block.rest is None:
                continue
            self._lend(block)
            if not block.is_filled:
                begin = self._clock.now() if self._clock.copies_block else None
                block.fill(self._pool)
                if begin is not None:
                    self._clock.waited(begin, self._clock.now())
            self._foreseen.append(block)

    def _lend(self, block: StreamBlock) -> None:
        rest = block.rest
        assert rest is not None
        # Its bytes may be there still.
        index = next((i for i, buffer in enumerate(self._free) if buffer.master is block.master), 0)
        rest.buffer = self._free.pop(index)
        rest.buffer.first, rest.buffer.stop = rest.first, rest.stop

    def _forget_foreseen(self) -> None:
        for block in self._foreseen:
            if block.rest is not None and block.rest.buffer is not None:
                self._free.append(block.rest.buffer)
                block.rest.buffer = None
        self._foreseen = []
