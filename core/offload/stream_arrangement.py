"""How the blocks of a streamed model are spread over the target: what stays, and slots for the rest.

What this module does not do: it decides no budget; ``streamer`` does, and ``stream_residents`` how to
spend it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..log import get_logger
from .stream_block import StreamBlock
from .stream_buffers import StreamPool
from .stream_flow import BlockFlow
from .stream_residents import choose_kept

_LOG = get_logger("offload")
# Free memory is never quite the same twice; a share of the weights that is not worth copying others again.
_LEAST_GAIN = 0.01


class Arrangement:
    """Gives blocks their target memory and takes it back.

    Args:
        blocks: The blocks of one model.
        flow: Brings them in.
        pool: Slots and copies.
        other_slot_bytes: Returns how large a slot has to be for other models.
    """

    def __init__(
        self,
        blocks: Sequence[StreamBlock],
        flow: BlockFlow,
        pool: StreamPool,
        other_slot_bytes: Callable[[], int],
    ) -> None:
        self._blocks = blocks
        self._flow = flow
        self._pool = pool
        self._other_slot_bytes = other_slot_bytes
        self._is_open = False
        # The last request, answered as well as it can be.
        self._fitted_to: tuple[int, int] | None = None

    @property
    def held_bytes(self) -> int:
        """Target memory of what stays."""
        return sum(block.held_bytes for block in self._blocks)

    @property
    def slot_bytes(self) -> int:
        """How large a slot has to be for what streams."""
        return max((block.rest.nbytes for block in self._blocks if block.rest is not None), default=0)

    def fit(self, capacity_bytes: int) -> None:
        """Let as much of the blocks stay as fits into a capacity, slots included.

        A block that runs just now stays as it is, and all do where a new arrangement would gain next to
        nothing: it would move bytes that are there already.

        Raises:
            torch.OutOfMemoryError: If the target has no memory for the slots.
        """
        other_slot_bytes = self._other_slot_bytes()
        if self._suits(capacity_bytes, other_slot_bytes):
            self._pool.settle_slots(max(self.slot_bytes, other_slot_bytes))
            return
        self._fitted_to = (capacity_bytes, other_slot_bytes)
        while True:
            kept = self._choose(capacity_bytes, other_slot_bytes)
            try:
                self._keep(kept)
                return
            except torch.OutOfMemoryError:
                # What stays is a cache: with less of it the model computes the same.
                if not any(kept):
                    raise
                _LOG.info("the target has no memory for %d bytes of resident weights", sum(kept))
                capacity_bytes = min(capacity_bytes, sum(kept)) * 3 // 4
                self._fitted_to = None

    def give_way(self, held_bytes: int) -> None:
        """Let at most ``held_bytes`` stay, whatever slots that takes: those belong to another model now."""
        self._fitted_to = None
        largest = max((block.master.nbytes for block in self._blocks), default=0)
        self._keep(self._choose(held_bytes + self._pool.num_slots * largest, largest))

    def release(self) -> None:
        """Give all target memory back, and the slots if no other model needs them."""
        self._is_open, self._fitted_to = False, None
        for block in self._blocks:
            block.unbind()
            self._flow.let_go(block)
            block.release(self._pool.transfer)
        self._pool.settle_slots(self._other_slot_bytes())

    def _suits(self, capacity_bytes: int, other_slot_bytes: int) -> bool:
        """Return whether the present arrangement fits, and next to nothing more would."""
        used_bytes = self.held_bytes + self._pool.num_slots * max(self.slot_bytes, other_slot_bytes)
        gain_bytes = capacity_bytes - used_bytes
        if not self._is_open or gain_bytes < 0:
            return False
        least_gain_bytes = _LEAST_GAIN * sum(block.master.nbytes for block in self._blocks)
        return gain_bytes < least_gain_bytes or self._fitted_to == (capacity_bytes, other_slot_bytes)

    def _choose(self, capacity_bytes: int, least_slot_bytes: int) -> list[int]:
        return choose_kept(
            [_options(block) for block in self._blocks],
            capacity_bytes,
            num_slots=self._pool.num_slots,
            least_slot_bytes=least_slot_bytes,
        )

    def _keep(self, kept: Sequence[int]) -> None:
        slot_bytes = self._other_slot_bytes()
        changing = []
        for block, nbytes in zip(self._blocks, kept, strict=True):
            stays = nbytes if block.depth == 0 else block.kept_bytes
            slot_bytes = max(slot_bytes, block.master.nbytes - stays)
            if stays != block.kept_bytes or not block.parts:
                changing.append((block, nbytes))
        for block, nbytes in changing:
            self._flow.forget(block)
            self._flow.let_go(block)
            block.keep(min(nbytes, block.kept_bytes), self._pool.transfer)
        self._flow.has_streamed = self._is_open = True
        # After what goes and before what comes, so that the slots are sure to have memory.
        self._pool.settle_slots(slot_bytes)
        for block, nbytes in changing:
            block.keep(nbytes, self._pool.transfer)


def _options(block: StreamBlock) -> list[int]:
    return block.cuts if block.depth == 0 else sorted({block.kept_bytes, block.master.nbytes})
