"""Host memory of streamed MODELs that workers can map, so that making them parallel moves no weight."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import weakref
from collections.abc import Callable

import torch

from ..workers import SharedFile

_regions: dict[int, tuple[int, SharedFile]] = {}  # by address: bytes, file
# Reentrant: a finalizer may run at any point of a thread that holds it.
_lock = threading.RLock()


def shared_reserve() -> Callable[[int], mmap.mmap] | None:
    """Return what gives a streamed model such memory; None where the system has no memory files."""
    return _reserve if hasattr(os, "memfd_create") else None


def find_region(tensor: torch.Tensor) -> tuple[SharedFile, int] | None:
    """Return the file in which a tensor lies and the tensor's place there in bytes, or None.

    Args:
        tensor: Any; only contiguous ones on the CPU are found.
    """
    if tensor.device.type != "cpu" or not tensor.numel() or not tensor.is_contiguous():
        return None
    address = tensor.data_ptr()
    with _lock:
        for start, (nbytes, file) in _regions.copy().items():  # a finalizer may run meanwhile
            if start <= address and address + tensor.nbytes <= start + nbytes:
                return file, address - start
    return None


def _reserve(nbytes: int) -> mmap.mmap:
    file = SharedFile.create("masters", nbytes)
    mapping, _ = file.map_memory()
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    with _lock:
        _regions[address] = (nbytes, file)
    weakref.finalize(mapping, _forget, address).atexit = False
    return mapping


def _forget(address: int) -> None:
    with _lock:
        _, file = _regions.pop(address)
    file.close()
