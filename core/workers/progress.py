"""How far a job has come, where the parent sees it without asking.

A rank that waits for its GPU, or inside NCCL for another rank's, uses a core whether anything moves or
not. What tells a slow forward from one that hangs is a count of the parts that are done: ``mark`` adds one
where the *device* has got to that point of its stream, also when a CUDA graph is replayed, by a copy into
the memory that this process shares with its parent. A rank whose GPU is slow, or that waits for such a
rank, goes on counting, and one that hangs keeps them all from it.

Beside the count stands whether the rank's host has nothing left to do but wait for its device, which looks
like computing too.

Source: host memory that the device writes, https://docs.nvidia.com/cuda/cuda-runtime-api/ (cudaHostRegister).
"""

from __future__ import annotations

import contextlib
import mmap
import struct
from collections.abc import Iterator
from typing import Any

import torch

from ..log import get_logger
from .bootstrap import COLLECTIVE_BYTE

# Behind the heartbeat's counter.
OFFSET_BYTES = 8
_COUNT = struct.Struct("<q")
_WAITING_BYTE = OFFSET_BYTES + _COUNT.size
_log = get_logger("workers")


class ProgressCounter:
    """Counts the marks of one rank.

    Args:
        memory: The page that the parent sees; None: nobody looks.
        device: Where the rank computes.
    """

    def __init__(self, memory: mmap.mmap | None, device: torch.device) -> None:
        self._memory = self._page = memory
        self._done = 0
        self._on_device: torch.Tensor | None = None
        self._seen: torch.Tensor | None = None
        if memory is not None and device.type == "cuda":
            self._memory = None
            self._register(memory, device)

    def mark(self) -> None:
        """Count one more part as done, once the device has done it."""
        if self._on_device is not None and self._seen is not None:
            self._on_device.add_(1)
            self._seen.copy_(self._on_device, non_blocking=True)
        elif self._memory is not None:
            self._done += 1
            _COUNT.pack_into(self._memory, OFFSET_BYTES, self._done)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """While inside, the host only waits for its device, or for other ranks."""
        if self._page is not None:
            self._page[_WAITING_BYTE] = 1
        try:
            yield
        finally:
            if self._page is not None:
                self._page[_WAITING_BYTE] = 0

    def _register(self, memory: mmap.mmap, device: torch.device) -> None:
        page = torch.frombuffer(memory, dtype=torch.int64)
        runtime: Any = torch.cuda.cudart()
        code = int(runtime.cudaHostRegister(page.data_ptr(), len(memory), 0))
        if code:
            # Long calls are judged by their whole time then, as before anything is known of them.
            _log.info("progress is not counted: cudaHostRegister failed with CUDA error %d", code)
            return
        self._on_device = torch.zeros((), dtype=torch.int64, device=device)
        self._seen = page[OFFSET_BYTES // page.element_size()]


def read_progress(memory: mmap.mmap) -> int:
    """Return how many parts a rank has done so far, in its parent."""
    return _COUNT.unpack_from(memory, OFFSET_BYTES)[0]


def read_waiting(memory: mmap.mmap) -> bool:
    """Return whether a rank's host only waits, as it says or as its beating thread sees, in its parent."""
    return memory[_WAITING_BYTE] != 0 or memory[COLLECTIVE_BYTE] != 0
