"""Host memory for the masters: a bounded bump allocator over plain memory, pinned by registration.

The sizes are known before the first byte is taken, so every chunk is exactly as large as what goes
into it: 256-byte alignment and nothing else is added (``torch``'s own pinned allocator rounds every
tensor up to a power of two). A chunk's pages are committed by filling it, tensor by tensor, and it
is pinned once full; host memory peaks at the model plus one tensor.

Every tensor handed out has its own ``torch`` storage, so saving one does not write the arena.

The memory is the process's own, or any that ``reserve`` gives: ``shared_masters`` maps one file into
several processes.

What this module does not do: it decides no limit; ``pinning`` pins, or says that a chunk stays pageable.

Idea: DiffSynth-Studio ``core/offload_training/memory_buffer.py``, written anew without its
rounding and its fallbacks.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import weakref
from collections.abc import Callable, Sequence

import torch

from ..errors import OffloadError
from .pinning import HostPinning
from .segments import align

CHUNK_BYTES = 512 * 2**20
_GB = 10**9


class ArenaFullError(OffloadError):
    """More was asked of an arena than it was made for."""


class HostRegion:
    """A run of host bytes inside a chunk; 256-byte aligned."""

    def __init__(self, chunk: _Chunk, offset: int, nbytes: int) -> None:
        self._chunk = chunk
        self._offset = offset
        self.nbytes = nbytes

    @property
    def is_pageable(self) -> bool:
        """Whether it was to be pinned, and a limit was reached."""
        return self._chunk.is_tried and not self._chunk.pinned_bytes

    def tensor(self, offset: int, nbytes: int) -> torch.Tensor:
        """Return bytes ``offset .. offset + nbytes`` as uint8 ``[nbytes]`` with a storage of its own."""
        with torch.inference_mode(False):
            if nbytes == 0:
                return torch.empty(0, dtype=torch.uint8, device="cpu")
            start = self._offset + offset
            view = memoryview(self._chunk.memory)[start : start + nbytes]
            return torch.frombuffer(view, dtype=torch.uint8)


class _Chunk:
    """One mapping; unpinned before it is unmapped."""

    def __init__(self, nbytes: int, memory: mmap.mmap) -> None:
        self.nbytes = nbytes
        self.used_bytes = 0
        self.memory = memory
        self.is_tried = False
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self._unpin: weakref.finalize | None = None

    @property
    def pinned_bytes(self) -> int:
        return self.nbytes if self._unpin is not None and self._unpin.alive else 0

    def pin(self, pinning: HostPinning) -> None:
        if self.is_tried:
            return
        self.is_tried = True
        if pinning.pin(self.address, self.nbytes):
            # The mapping is an argument, so it cannot go before its registration.
            self._unpin = weakref.finalize(self, _unpin, pinning, self.address, self.nbytes, self.memory)
            self._unpin.atexit = False

    def unpin(self) -> None:
        if self._unpin is not None:
            self._unpin()


class PinnedArena:
    """Hand out the planned regions, in the planned order.

    Args:
        sizes: Bytes of every region to come, in order.
        pin: Whether to register the memory with CUDA; or what does so, within which limits.
        chunk_bytes: Upper bound of a chunk that holds more than one region.
        reserve: Gives the memory of a chunk; None: memory of this process alone.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        *,
        pin: bool | HostPinning,
        chunk_bytes: int = CHUNK_BYTES,
        reserve: Callable[[int], mmap.mmap] | None = None,
    ) -> None:
        self._pinning = HostPinning() if pin is True else (pin or None)
        self._reserve = reserve or _map_memory
        self._planned = _plan_chunks(sizes, chunk_bytes)
        self._chunks: list[_Chunk] = []

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all chunks mapped so far."""
        return sum(chunk.nbytes for chunk in self._chunks)

    @property
    def pinned_bytes(self) -> int:
        """Bytes registered with CUDA now."""
        return sum(chunk.pinned_bytes for chunk in self._chunks)

    def allocate(self, nbytes: int) -> HostRegion:
        """Return the next region.

        Raises:
            ArenaFullError: If the arena was not made for it.
            OffloadError: If pinning the chunk before it, now full, fails for another reason than a limit, or
                the system has no memory for the next.
        """
        needed = align(nbytes)
        chunk = self._chunks[-1] if self._chunks else None
        if chunk is None or chunk.used_bytes + needed > chunk.nbytes:
            self._pin_last()
            planned = self._planned[0] if self._planned else 0
            if needed > planned:
                raise ArenaFullError(
                    f"{nbytes} bytes were asked of a host arena whose next chunk has {planned} bytes; it "
                    f"holds {self.allocated_bytes} bytes. Make the arena for all sizes that go into it."
                )
            chunk_bytes = self._planned.pop(0)
            chunk = _Chunk(chunk_bytes, self._take(chunk_bytes))
            self._chunks.append(chunk)
        region = HostRegion(chunk, chunk.used_bytes, nbytes)
        chunk.used_bytes += needed
        return region

    def _take(self, nbytes: int) -> mmap.mmap:
        try:
            return self._reserve(nbytes)
        except OSError as error:
            raise OffloadError(
                f"The system refused {nbytes / _GB:.2f} GB of host memory for weights ({error.strerror}); "
                f"{self.allocated_bytes / _GB:.2f} GB were there before. Free host memory, raise the limits "
                "of the process or container, or load the model in a smaller dtype (fp8)."
            ) from error

    def seal(self) -> None:
        """Pin the last chunk; call when everything is filled.

        Raises:
            OffloadError: If that fails for another reason than a limit.
        """
        self._pin_last()

    def unpin(self) -> None:
        """Unregister everything; the memory lives on while a tensor uses it."""
        self._pinning = None
        for chunk in self._chunks:
            chunk.unpin()

    def contains(self, address: int) -> bool:
        """Return whether a host address lies in this arena."""
        return any(chunk.address <= address < chunk.address + chunk.nbytes for chunk in self._chunks)

    def _pin_last(self) -> None:
        if self._pinning is not None and self._chunks:
            self._chunks[-1].pin(self._pinning)


def _plan_chunks(sizes: Sequence[int], chunk_bytes: int) -> list[int]:
    chunks: list[int] = []
    for size in map(align, sizes):
        if chunks and chunks[-1] + size <= chunk_bytes:
            chunks[-1] += size
        elif size:
            chunks.append(size)
    return chunks or [align(1)]


def _map_memory(nbytes: int) -> mmap.mmap:
    # Python's default on POSIX is a shared mapping, which counts against the shared-memory limit.
    if not hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, nbytes)
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # Fewer pages to pin, and to walk through in an optimizer's step. A kernel built without them refuses.
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _unpin(pinning: HostPinning, address: int, nbytes: int, memory: mmap.mmap) -> None:
    del memory
    pinning.unpin(address, nbytes)
