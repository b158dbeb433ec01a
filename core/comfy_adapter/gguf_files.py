"""GGUF files, whose headers the package ``gguf`` reads.

A quantized matrix stays what it is in the file, a ``PackedWeight``. Other tensors are made numbers here, and
so are the types that ``core.offload`` does not know, by the package.

Source: https://github.com/ggml-org/llama.cpp/tree/master/gguf-py. Image models note a tensor's true shape
under ``comfy.gguf.orig_shape.<name>`` where GGUF's own cannot hold it.
"""

from __future__ import annotations

import importlib
import struct
from pathlib import Path
from typing import Any

import torch

from ..errors import RequestError
from ..offload import GGUF_FORMATS, MappedFile, PackedWeight
from .gguf_header import check_header

GGUF_SUFFIX = ".gguf"
# What quantized values become: a file says nothing of a dtype to compute in.
_DTYPE = torch.bfloat16
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_SHAPE_FIELD = "comfy.gguf.orig_shape."
_BAD_FILE_ERRORS = (
    ValueError,
    LookupError,
    TypeError,
    OSError,
    RuntimeError,
    ArithmeticError,
    MemoryError,
    struct.error,
)


def open_gguf(path: Path) -> tuple[MappedFile, dict[str, torch.Tensor]]:
    """Return a GGUF file and every tensor of it by name, over the file's bytes.

    Plain ones are what they are; quantized matrices are ``PackedWeight`` objects in bf16, and other quantized
    tensors bf16 in memory of their own.

    Raises:
        RequestError: If the package is not installed, the file is not whole or not sound, or has a type that
            is not known here.
    """
    try:
        gguf: Any = importlib.import_module("gguf")
        quants: Any = importlib.import_module("gguf.quants")
    except ImportError as error:
        raise RequestError(
            f"loading {path.name} was asked",
            limit=f"GGUF files are read by the package gguf, which cannot be imported ({error})",
            way_out="pip install gguf, or use a safetensors file",
        ) from error
    try:
        check_header(path)
        reader = gguf.GGUFReader(path)
        file = MappedFile(path)
        _check_places(reader.tensors, file.size_bytes)
        _check_known(path, reader.tensors, quants)
        return file, {tensor.name: _open_tensor(file, reader, tensor, quants) for tensor in reader.tensors}
    except RequestError:
        raise
    except _BAD_FILE_ERRORS as error:
        raise RequestError(
            f"loading {path.name} was asked",
            limit=f"It is no whole, sound GGUF file ({type(error).__name__}: {error})",
            way_out="Download the file again",
        ) from error


def _check_places(tensors: Any, size_bytes: int) -> None:
    reached = 0
    for first, count in sorted((int(tensor.data_offset), int(tensor.n_bytes)) for tensor in tensors):
        if first < reached:
            raise ValueError("its tensors share bytes")
        reached = first + count
    if reached > size_bytes:
        raise ValueError("it ends before its tensors do")


def _check_known(path: Path, tensors: Any, quants: Any) -> None:
    foreign = sorted(
        f"{tensor.name} ({tensor.tensor_type.name})"
        for tensor in tensors
        if tensor.tensor_type.name not in (*_PLAIN, *GGUF_FORMATS) and not _is_known(tensor, quants)
    )
    if foreign:
        raise RequestError(
            f"loading {path.name} was asked, in which {len(foreign)} tensors are {', '.join(foreign[:3])}",
            limit="Neither this pack nor the package gguf makes numbers of these types",
            way_out=f"Download the model in one of {', '.join(GGUF_FORMATS)}",
        )


def _is_known(tensor: Any, quants: Any) -> bool:
    """Try the package's dequantization on the first row."""
    try:
        quants.dequantize(tensor.data.reshape(-1, tensor.data.shape[-1])[:1], tensor.tensor_type)
    except NotImplementedError:
        return False
    return True


def _open_tensor(file: MappedFile, reader: Any, tensor: Any, quants: Any) -> torch.Tensor:
    kind = tensor.tensor_type.name
    first = int(tensor.data_offset)
    stop = first + int(tensor.n_bytes)
    stored = [int(size) for size in reversed(tensor.shape)]
    field = reader.get_field(_SHAPE_FIELD + tensor.name)
    shape = stored if field is None else [int(field.parts[index][0]) for index in field.data]
    if kind in _PLAIN:
        return file.tensor(_PLAIN[kind], tuple(stored), first, stop).reshape(shape)
    if kind not in GGUF_FORMATS:
        values = quants.dequantize(tensor.data, tensor.tensor_type)
        return torch.from_numpy(values).reshape(shape).to(_DTYPE)
    layout = GGUF_FORMATS[kind]
    row_bytes = stored[-1] // layout.weights * layout.nbytes
    blocks = file.tensor(torch.uint8, ((stop - first) // row_bytes, row_bytes), first, stop)
    packed = PackedWeight(blocks, kind, (_DTYPE,))
    return packed if len(stored) == 2 and shape == stored else packed.dense().reshape(shape)
