"""GGUF files, read by the ``gguf`` package and dequantized while they are loaded.

So a GGUF model streams in 16 bits: the file is small, the memory is that of the whole model.

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
from .gguf_header import check_header

GGUF_SUFFIX = ".gguf"
_PLAIN = {"F32": torch.float32, "F16": torch.float16}
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


def read_gguf(path: Path) -> dict[str, torch.Tensor]:
    """Return every tensor of a GGUF file by name: F32 and F16 as they are, all other types as bf16.

    Raises:
        RequestError: If the package is not installed, or the file is not whole or not sound.
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
        if sum(int(tensor.n_bytes) for tensor in reader.tensors) > path.stat().st_size:
            raise ValueError("its tensors share bytes")
        return {tensor.name: _dequantize(reader, tensor, quants) for tensor in reader.tensors}
    except _BAD_FILE_ERRORS as error:
        raise RequestError(
            f"loading {path.name} was asked",
            limit=f"It is no whole, sound GGUF file ({type(error).__name__}: {error})",
            way_out="Download the file again",
        ) from error


def _dequantize(reader: Any, tensor: Any, quants: Any) -> torch.Tensor:
    kind = tensor.tensor_type.name
    array = quants.dequantize(tensor.data, tensor.tensor_type)
    # Plain types come as a view of the mapped file.
    values = torch.from_numpy(array if array.flags.writeable else array.copy())
    field = reader.get_field(_SHAPE_FIELD + tensor.name)
    if field is None:
        shape = [int(size) for size in reversed(tensor.shape)]
    else:
        shape = [int(field.parts[index][0]) for index in field.data]
    return values.reshape(shape).to(_PLAIN.get(kind, torch.bfloat16))
