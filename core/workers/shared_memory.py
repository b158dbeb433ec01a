"""Nameless shared memory: memfd files, and the buffers in which messages carry their tensors.

A memfd has no name and no place in ``/dev/shm``: it is as large as the host's memory allows,
reaches another process only as a file descriptor sent over our own socket, and is gone when the
last process that holds it is gone, however that process ended.

Buffers are lent. The sender (``BufferLender``) writes a message's tensors into one of its buffers,
and may reuse that buffer only after each receiver said that it is done with it. The receiver
(``BufferMap``) maps a buffer once and finds it by number from then on, so that a steady stream of
messages allocates nothing and sends no descriptor.

What this module does not do: it knows neither messages nor sockets.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable

import torch

ALIGNMENT_BYTES = 64
SMALLEST_BUFFER_BYTES = 1 << 16
# A free buffer above this size goes back to the system instead of waiting for the next message.
LARGEST_KEPT_BYTES = 256 << 20


def align(num_bytes: int, unit_bytes: int = ALIGNMENT_BYTES) -> int:
    """Return ``num_bytes`` rounded up, by default to the alignment of every tensor in shared memory."""
    return -(-num_bytes // unit_bytes) * unit_bytes


def read_bytes(view: torch.Tensor) -> bytes:
    """Return a copy of a contiguous uint8 CPU tensor's bytes (without NumPy, which PyTorch may lack)."""
    return ctypes.string_at(view.data_ptr(), view.numel()) if view.numel() else b""


class SharedFile:
    """One memfd, owned: the descriptor is closed with the object; mappings live on without it.

    Args:
        descriptor: A file descriptor that now belongs to this object.
        size_bytes: Bytes that may be mapped.

    Attributes:
        version: Grows whenever its owner changed what others may have copied.
    """

    def __init__(self, descriptor: int, size_bytes: int) -> None:
        self.version = 0
        self.descriptor = descriptor
        self.size_bytes = size_bytes
        self._closer = weakref.finalize(self, os.close, descriptor)

    @classmethod
    def create(cls, label: str, size_bytes: int) -> SharedFile:
        """Make a new file of ``size_bytes`` zeros; pages take memory only once they are written.

        Args:
            label: What ``/proc/<pid>/maps`` shows for it; need not be unique.
            size_bytes: At least 1.
        """
        file = cls(os.memfd_create(f"ferry-{label}"), size_bytes)
        os.ftruncate(file.descriptor, size_bytes)
        return file

    def extend(self, size_bytes: int) -> None:
        """Make the file longer; existing mappings keep their length."""
        os.ftruncate(self.descriptor, size_bytes)
        self.size_bytes = size_bytes

    def map(self, *, writable: bool, offset_bytes: int = 0) -> torch.Tensor:
        """Map the file from ``offset_bytes`` (a multiple of the page size) to its end.

        Returns:
            uint8 tensor ``[size_bytes - offset_bytes]`` on the CPU that shares the memory. The
            mapping lasts as long as any tensor made from it. Writing through one that is not
            ``writable`` ends the process with SIGSEGV: loud, where silent damage is the alternative.
        """
        if writable:
            return self.map_memory(offset_bytes=offset_bytes)[1]
        size_bytes = self.size_bytes - offset_bytes
        mapping = mmap.mmap(self.descriptor, size_bytes, prot=mmap.PROT_READ, offset=offset_bytes)
        with torch.inference_mode(False), warnings.catch_warnings():
            # Not thread-safe; only workers map read-only, in one thread.
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            return torch.frombuffer(mapping, dtype=torch.uint8)

    def map_memory(self, *, offset_bytes: int = 0) -> tuple[mmap.mmap, torch.Tensor]:
        """Map the file writable, as ``map`` does; return the mapping besides its tensor."""
        mapping = mmap.mmap(self.descriptor, self.size_bytes - offset_bytes, offset=offset_bytes)
        # A mapping made under ComfyUI's inference mode must also serve callers outside of it.
        with torch.inference_mode(False):
            return mapping, torch.frombuffer(mapping, dtype=torch.uint8)

    def close(self) -> None:
        """Close the descriptor now."""
        self._closer()


class LentBuffer:
    """A buffer in the hands of its sender, or of ``holders`` receivers.

    Args:
        number: Its number, unique to its lender.
        file: The memory.
    """

    def __init__(self, number: int, file: SharedFile) -> None:
        self.number = number
        self.file = file
        self.view = file.map(writable=True)
        self.holders = 0


class BufferLender:
    """The buffers that one process writes messages into. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[LentBuffer] = []
        self._lent: dict[int, LentBuffer] = {}
        self._next_number = 0

    def lend(self, size_bytes: int, holders: int) -> LentBuffer:
        """Return a buffer of at least ``size_bytes`` that comes back after ``holders`` returns."""
        with self._lock:
            buffer = self._take_free(size_bytes)
            if buffer is None:
                # A power of two: memory is taken page by page as it is written, so slack is free.
                rounded = max(SMALLEST_BUFFER_BYTES, 1 << (size_bytes - 1).bit_length())
                buffer = LentBuffer(self._next_number, SharedFile.create("message", rounded))
                self._next_number += 1
            buffer.holders = holders
            self._lent[buffer.number] = buffer
            return buffer

    def take_back(self, numbers: Iterable[int]) -> None:
        """Count one return of each buffer; after the last holder's it is free again."""
        with self._lock:
            for number in numbers:
                buffer = self._lent[number]
                buffer.holders -= 1
                if buffer.holders == 0:
                    del self._lent[number]
                    if buffer.file.size_bytes <= LARGEST_KEPT_BYTES:
                        self._free.append(buffer)

    def numbers(self) -> set[int]:
        """Return the buffers that exist; a receiver may forget any other."""
        with self._lock:
            return {buffer.number for buffer in self._free} | set(self._lent)

    def _take_free(self, size_bytes: int) -> LentBuffer | None:
        self._free.sort(key=lambda buffer: buffer.file.size_bytes)
        for index, buffer in enumerate(self._free):
            if buffer.file.size_bytes >= size_bytes:
                return self._free.pop(index)
        if self._free:
            self._free.pop()  # Too small: the larger one about to be made takes its place.
        return None


class BufferMap:
    """The other side's buffers, mapped once each.

    Args:
        writable: Whether views may be written. A worker maps the parent's buffers read-only,
            because other ranks read the same memory.
    """

    def __init__(self, *, writable: bool) -> None:
        self._writable = writable
        self._views: dict[int, torch.Tensor] = {}
        self._mappings: dict[int, mmap.mmap] = {}

    def add(self, number: int, file: SharedFile) -> None:
        """Map a buffer that was received for the first time."""
        if self._writable:
            self._mappings[number], self._views[number] = file.map_memory()
        else:
            self._views[number] = file.map(writable=False)

    def view(self, number: int) -> torch.Tensor:
        """Return buffer ``number`` as a uint8 tensor."""
        return self._views[number]

    def forget(self, numbers: Iterable[int]) -> None:
        """Drop the mappings of buffers that no longer exist."""
        for number in numbers:
            self._views.pop(number, None)
            self._mappings.pop(number, None)

    def lease(self, number: int, when_over: Callable[[int], object]) -> torch.Tensor:
        """Return a buffer mapped writable as a tensor whose memory has an end of its own.

        Args:
            number: The buffer.
            when_over: Called with it, in any thread, once no tensor over that memory is left.
        """
        mapping = self._mappings[number]
        held = (ctypes.c_char * len(mapping)).from_buffer(mapping)
        weakref.finalize(held, when_over, number).atexit = False
        with torch.inference_mode(False):
            return torch.frombuffer(held, dtype=torch.uint8)
