"""Pinned host memory through which blocks go that are read from their file for every use.

What this module does not do: it knows no block.
"""

from __future__ import annotations

import torch

from .pinned_arena import PinnedArena
from .transfer import Transfer


class Staging:
    """Pinned host memory through which file-backed blocks go."""

    def __init__(self, transfer: Transfer, nbytes: int) -> None:
        is_cuda = transfer.device.type == "cuda"
        self._arena = PinnedArena([nbytes], pin=is_cuda)
        self.host = self._arena.allocate(nbytes).tensor(0, nbytes)
        self.host.zero_()  # commits the pages before they are pinned
        self._arena.seal()
        self._copied = torch.cuda.Event() if is_cuda else None

    def wait(self) -> None:
        """Wait until the copy from here is over."""
        if self._copied is not None:
            self._copied.synchronize()

    def note_copy(self, stream: torch.cuda.Stream | None) -> None:
        """Record that a copy from here was just started."""
        if self._copied is not None and stream is not None:
            self._copied.record(stream)
