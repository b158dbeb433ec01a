"""Pinned host memory through which blocks go that are read from their file for every use.

What this module does not do: it knows no block.
"""

from __future__ import annotations

from .pinned_arena import PinnedArena
from .staging import PinnedBuffer
from .transfer import Transfer


class Staging(PinnedBuffer):
    """Pinned host memory through which file-backed blocks go."""

    def __init__(self, transfer: Transfer, nbytes: int) -> None:
        is_cuda = transfer.device.type == "cuda"
        self._arena = PinnedArena([nbytes], pin=is_cuda)
        super().__init__(self._arena.allocate(nbytes).tensor(0, nbytes), is_cuda)
        self.memory.zero_()  # commits the pages before they are pinned
        self._arena.seal()
