"""Safetensors files as tensors that cost no memory until their bytes are asked for.

A tensor here lies over a private mapping of its file. What copies it into the arena does not read the
mapping, though, but the file (``read``), straight into its place: so no page is in memory twice. Whoever
loads a model may write to the tensors first (ComfyUI swaps halves of some diffusers weights in place);
the file knows nothing of that, so such a tensor does not count as one of the file's any more.

Nothing in a file is trusted: sizes, shapes and offsets are checked before the first tensor is made.

Source: the safetensors format, https://github.com/huggingface/safetensors (Format).
"""

from __future__ import annotations

import bisect
import itertools
import json
import math
import mmap
import os
from pathlib import Path
from typing import Any

import torch

from ..errors import OffloadError, RequestError
from .segments import view_of_storage

_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_MAX_DIMS = 18
_MAX_NUMBER = 2**48
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
}
# Block scales of mxfp8 among them; torch knows them from 2.7 on.
_NEWER_DTYPES = {
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
}
_DTYPES |= {name: getattr(torch, kind) for name, kind in _NEWER_DTYPES.items() if hasattr(torch, kind)}


class WeightFile:
    """One safetensors file.

    Args:
        path: The file.

    Attributes:
        metadata: Text that the file carries about itself.
        nbytes: Bytes of all tensors.

    Raises:
        RequestError: If it is no whole, sound safetensors file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            if not path.is_file():  # opening a pipe would wait for whoever writes to it
                raise FileNotFoundError("no such file")
            self._file = path.open("rb", buffering=0)
        except (OSError, ValueError) as error:  # ValueError: names that no file can have
            raise _refusal(path, f"It cannot be opened ({error})", "Check the file") from error
        try:
            size = os.fstat(self._file.fileno()).st_size
            header, self._start = _read_header(path, self._file, size)
            self.metadata = _metadata(path, header.pop("__metadata__", {}))
            self._entries = {name: _entry(path, name, value) for name, value in header.items()}
            self.nbytes = _check_offsets(path, self._entries, size - self._start)
            self._map = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_COPY)
        except BaseException:
            self._file.close()
            raise
        with torch.inference_mode(False):
            self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        # Where each tensor that was handed out ends in the mapping, with the tensor; ascending.
        self._given: list[tuple[int, torch.Tensor, int]] = []

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return every tensor by name, over the mapping."""
        made = {name: self._tensor(*entry) for name, entry in self._entries.items()}
        given = [(self._start + self._entries[name][3], tensor) for name, tensor in made.items()]
        self._given += [(stop, tensor, tensor._version) for stop, tensor in given]
        self._given.sort(key=lambda one: one[0])
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
            OffloadError: If the file has become shorter.
        """
        offset = address - self._bytes.data_ptr()
        if not 0 <= offset <= self._bytes.numel() - destination.numel() or self._is_written(offset):
            return False
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

    def _tensor(self, dtype: torch.dtype, shape: tuple[int, ...], first: int, stop: int) -> torch.Tensor:
        stride = tuple(math.prod(shape[index + 1 :]) for index in range(len(shape)))
        begin = self._start + first
        with torch.inference_mode(False):
            if begin % dtype.itemsize or first == stop:  # a storage is counted in whole elements
                storage = self._bytes[begin : self._start + stop].clone().untyped_storage()
                return view_of_storage(storage, dtype, 0, shape, stride)
            return view_of_storage(
                self._bytes.untyped_storage(), dtype, begin // dtype.itemsize, shape, stride
            )


def _refusal(path: Path, limit: str, way_out: str = "Download or save the file again") -> RequestError:
    return RequestError(f"loading {path.name} was asked", limit=limit, way_out=way_out)


def _read_header(path: Path, file: Any, size: int) -> tuple[dict[str, Any], int]:
    length = int.from_bytes(file.read(8), "little")  # fewer bytes than 8 are caught by the next line
    if size < 8 or length > size - 8:
        raise _refusal(path, f"It has {size} bytes, fewer than its own header says: it is not whole")
    if length > _MAX_HEADER_BYTES:
        raise _refusal(path, f"Its header has {length} bytes; the format allows {_MAX_HEADER_BYTES}")
    try:
        header = json.loads(file.read(length).decode(), object_pairs_hook=_without_repetition)
    except (ValueError, RecursionError) as error:
        raise _refusal(path, f"Its header is no valid JSON ({error})") from error
    if not isinstance(header, dict):
        raise _refusal(path, "Its header is no JSON object")
    return header, 8 + length


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name appears twice")
    return result


def _metadata(path: Path, value: Any) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise _refusal(path, "Its metadata is no table of texts")
    return value


def _entry(path: Path, name: str, value: Any) -> tuple[torch.dtype, tuple[int, ...], int, int]:
    try:
        dtype, shape, (first, stop) = _DTYPES[value["dtype"]], value["shape"], value["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise _refusal(path, f"The entry of {name!r} has no known dtype, shape and offsets") from error
    numbers = [first, stop, *shape] if isinstance(shape, list) else [None]
    if len(numbers) > _MAX_DIMS or not all(type(n) is int and 0 <= n <= _MAX_NUMBER for n in numbers):
        raise _refusal(path, f"The shape and offsets of {name!r} are no sensible whole numbers")
    if stop - first != math.prod(shape) * dtype.itemsize:
        raise _refusal(path, f"{name!r} of shape {shape} in {dtype} has {stop - first} bytes")
    return dtype, tuple(shape), first, stop


def _check_offsets(path: Path, entries: dict[str, tuple], available: int) -> int:
    reached = 0
    for name, (_, _, first, stop) in sorted(entries.items(), key=lambda item: item[1][2:]):
        if first < reached:
            raise _refusal(path, f"{name!r} shares bytes with another tensor")
        if stop > available:
            raise _refusal(path, f"It ends {stop - available} bytes before {name!r} does: it is not whole")
        reached = stop
    return reached
