"""A file of weights as tensors that cost no memory until their bytes are asked for.

A tensor here lies over a private mapping of its file. What copies it into the arena does not read the
mapping, though, but the file (``read``), straight into its place: so no page is in memory twice. Whoever
loads a model may write to the tensors first (ComfyUI swaps halves of some diffusers weights in place);
the file knows nothing of that, so such a tensor does not count as one of the file's any more.

What this module does not do: it knows no format. Places in the file are checked by those who read them.
"""

from __future__ import annotations

import bisect
import itertools
import math
import mmap
import os
from pathlib import Path
from typing import Any

import torch

from ..errors import OffloadError, RequestError
from .segments import view_of_storage


class MappedFile:
    """One file.

    Args:
        path: The file.

    Attributes:
        path: The file.
        size_bytes: Its length.

    Raises:
        RequestError: If it cannot be opened or is empty.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            if not path.is_file():  # opening a pipe would wait for whoever writes to it
                raise FileNotFoundError("no such file")
            self._file = path.open("rb", buffering=0)
        except (OSError, ValueError) as error:  # ValueError: names that no file can have
            raise _refusal(path, f"It cannot be opened ({error})") from error
        try:
            self._state = _state(self._file)
            self.size_bytes = self._state[0]
            if not self.size_bytes:
                raise _refusal(path, "It is empty: it is not whole")
            self._map = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_COPY)
        except BaseException:
            self._file.close()
            raise
        with torch.inference_mode(False):
            self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        # Where each tensor that was handed out ends in the file, with the tensor; ascending.
        self._given: list[tuple[int, torch.Tensor, int]] = []

    def tensor(self, dtype: torch.dtype, shape: tuple[int, ...], first: int, stop: int) -> torch.Tensor:
        """Return a contiguous tensor over bytes ``first .. stop``; over a copy where it must be one."""
        stride = tuple(math.prod(shape[index + 1 :]) for index in range(len(shape)))
        with torch.inference_mode(False):
            if first % dtype.itemsize or first == stop:  # a storage is counted in whole elements
                storage = self._bytes[first:stop].clone().untyped_storage()
                made = view_of_storage(storage, dtype, 0, shape, stride)
            else:
                made = view_of_storage(
                    self._bytes.untyped_storage(), dtype, first // dtype.itemsize, shape, stride
                )
        bisect.insort(self._given, (stop, made, made._version), key=lambda one: one[0])
        return made

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor's bytes are the file's: it lies over the mapping, not written to."""
        offset = tensor.data_ptr() - self._bytes.data_ptr()
        return 0 <= offset < self._bytes.numel() and not self._is_written(offset)

    def read(self, address: int, destination: torch.Tensor) -> bool:
        """Read the bytes at a mapped address from the file.

        Args:
            address: Of the first byte.
            destination: Contiguous host memory, uint8, as long as what is read.

        Returns:
            False if the address lies outside of this file's mapping, or in a tensor that was written to.

        Raises:
            OffloadError: If the file has been written to since it was opened.
        """
        offset = address - self._bytes.data_ptr()
        if not 0 <= offset <= self._bytes.numel() - destination.numel() or self._is_written(offset):
            return False
        if _state(self._file) != self._state:
            raise OffloadError(f"{self.path} has been written to since it was opened. Load it again.")
        array: Any = destination.numpy()
        view = memoryview(array)
        self._file.seek(offset)
        done = 0
        while done < len(view):
            count = self._file.readinto(view[done:])
            if not count:
                raise OffloadError(f"{self.path} has become shorter since it was opened. Load it again.")
            done += count
        return True

    def _is_written(self, offset: int) -> bool:
        """Return whether a tensor around that byte of the mapping, as handed out, has changed since."""
        first = bisect.bisect_right(self._given, offset, key=lambda one: one[0])
        if first == len(self._given):
            return False
        around = itertools.takewhile(lambda one: one[0] == self._given[first][0], self._given[first:])
        return any(tensor._version != version for _, tensor, version in around)


def _state(file: Any) -> tuple[int, int]:
    """Return a file's size in bytes and the time of its last change in ns."""
    status = os.fstat(file.fileno())
    return status.st_size, status.st_mtime_ns


def _refusal(path: Path, limit: str) -> RequestError:
    return RequestError(
        f"loading {path.name} was asked", limit=limit, way_out="Check the file, or download it again"
    )
