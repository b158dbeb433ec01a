"""Copies of matrices of bytes whose rows lie apart, from the host to a GPU, without the host's help.

PyTorch gathers such rows into another piece of host memory first and waits for that. The GPU's copy engine
reads them where they are (``cuMemcpy2DAsync``).

What this module does not do: it knows no order of streams.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch

from ..errors import OffloadError

_HOST, _DEVICE = 1, 2  # CUmemorytype


class RowCopy(ctypes.Structure):
    """``CUDA_MEMCPY2D`` of the CUDA driver API."""

    _fields_ = (
        ("source_x", ctypes.c_size_t),
        ("source_y", ctypes.c_size_t),
        ("source_type", ctypes.c_int),
        ("source_host", ctypes.c_void_p),
        ("source_device", ctypes.c_uint64),
        ("source_array", ctypes.c_void_p),
        ("source_pitch", ctypes.c_size_t),
        ("target_x", ctypes.c_size_t),
        ("target_y", ctypes.c_size_t),
        ("target_type", ctypes.c_int),
        ("target_host", ctypes.c_void_p),
        ("target_device", ctypes.c_uint64),
        ("target_array", ctypes.c_void_p),
        ("target_pitch", ctypes.c_size_t),
        ("width_bytes", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    )


def copy_to_gpu(source: torch.Tensor, destination: torch.Tensor, stream: torch.cuda.Stream) -> None:
    """Begin a copy on a stream, which is the current one.

    Args:
        source: On the host, best pinned; uint8 ``[n]``, or ``[rows, columns]`` with rows any distance apart.
        destination: The like on the GPU.
        stream: Of the destination's device.

    Raises:
        OffloadError: If CUDA refuses a copy of rows.
    """
    if source.is_contiguous() and destination.is_contiguous():
        destination.copy_(source, non_blocking=True)
        return
    code = driver().cuMemcpy2DAsync_v2(
        ctypes.byref(describe_rows(source, destination)), ctypes.c_void_p(stream.cuda_stream)
    )
    if code:
        raise OffloadError(
            f"Copying {tuple(source.shape)} bytes to {destination.device} failed (CUDA driver error {code})."
        )


def describe_rows(source: torch.Tensor, destination: torch.Tensor) -> RowCopy:
    """Return what the driver is told of a copy.

    Raises:
        ValueError: If the two are no like matrices of bytes.
    """
    for each in (source, destination):
        if each.dtype != torch.uint8 or each.shape != source.shape or each.ndim != 2 or each.stride(1) != 1:
            raise ValueError(f"no rows of bytes: {each.dtype} {tuple(each.shape)}, strides {each.stride()}")
    return RowCopy(
        source_type=_HOST,
        source_host=source.data_ptr(),
        source_pitch=source.stride(0),
        target_type=_DEVICE,
        target_device=destination.data_ptr(),
        target_pitch=destination.stride(0),
        width_bytes=source.shape[1],
        height=source.shape[0],
    )


@cache
def driver() -> Any:
    """Return CUDA's driver library, which is there where a GPU is."""
    library = ctypes.CDLL("libcuda.so.1")
    library.cuMemcpy2DAsync_v2.argtypes = [ctypes.POINTER(RowCopy), ctypes.c_void_p]
    return library
