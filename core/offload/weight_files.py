"""Safetensors files as tensors over a mapping of their bytes.

Nothing in a file is trusted: sizes, shapes and offsets are checked before the first tensor is made.

Source: the safetensors format, https://github.com/huggingface/safetensors (Format).
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch

from ..errors import RequestError
from .mapped_file import MappedFile

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


class WeightFile(MappedFile):
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
        super().__init__(path)
        try:
            header, self._start = _read_header(path, self._file, self.size_bytes)
            self.metadata = _metadata(path, header.pop("__metadata__", {}))
            self._entries = {name: _entry(path, name, value) for name, value in header.items()}
            self.nbytes = _check_offsets(path, self._entries, self.size_bytes - self._start)
        except BaseException:
            self._file.close()
            raise

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return every tensor by name, over the mapping."""
        return {
            name: self.tensor(dtype, shape, self._start + first, self._start + stop)
            for name, (dtype, shape, first, stop) in self._entries.items()
        }


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
