"""Read what ``protocol`` wrote: only data comes out, whatever a message says."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch

from .shared_memory import SharedFile, read_bytes


class _Decoder:
    """Reads one value. ``copy`` says whether its tensors own their memory or are views of ``view``."""

    def __init__(self, view: torch.Tensor | None, files: Sequence[SharedFile], copy: bool) -> None:
        self._view = view
        self._files = files
        self._copy = copy
        self._tensors: dict[int, torch.Tensor] = {}

    def decode(self, written: Any) -> Any:
        if isinstance(written, list):
            return [self.decode(item) for item in written]
        if not isinstance(written, dict):
            return written
        ((tag, content),) = written.items()
        return getattr(self, f"_read_{tag}")(content)

    def _read_t(self, content: list) -> tuple:
        return tuple(self.decode(item) for item in content)

    def _read_d(self, content: list) -> dict:
        items = iter(content)
        return {self.decode(key): self.decode(item) for key, item in zip(items, items, strict=True)}

    def _read_y(self, content: str) -> torch.dtype:
        return dtype_named(content)

    def _read_v(self, content: str) -> torch.device:
        return torch.device(content)

    def _read_s(self, content: list[int]) -> torch.Size:
        return torch.Size(content)

    def _read_f(self, content: list[int]) -> SharedFile:
        return self._files[content[0]]

    def _read_b(self, content: list[int]) -> bytes:
        offset, length = content
        return read_bytes(self._bytes_at(offset, length))

    def _read_x(self, content: list) -> torch.Tensor:
        offset = content[0]
        if offset not in self._tensors:
            dtype, shape = dtype_named(content[1]), content[2]
            self._tensors[offset] = self._tensor_at(offset, dtype, shape)
        return self._tensors[offset]

    def _tensor_at(self, offset: int, dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        raw = self._bytes_at(offset, num_bytes)
        return (raw.clone() if self._copy else raw).view(dtype).view(shape)

    def _bytes_at(self, offset: int, num_bytes: int) -> torch.Tensor:
        if self._view is None or offset < 0 or offset + num_bytes > self._view.numel():
            raise ValueError(f"{num_bytes} bytes at offset {offset} lie outside the message's buffer")
        return self._view[offset : offset + num_bytes]


def decode(
    content: bytes, view: torch.Tensor | None = None, *, files: Sequence[SharedFile] = (), copy: bool = True
) -> Any:
    """Read what ``PayloadEncoder.encode`` wrote.

    Args:
        content: The written form.
        view: The message's buffer, uint8; may be None if there are neither tensors nor bytes.
        files: The descriptors that came with the message, in order.
        copy: True: tensors own their memory. False: they are views of ``view`` and change when the
            buffer is reused.
    """
    with torch.inference_mode(False):  # What is read must be usable under autograd as well.
        return _Decoder(view, files, copy).decode(json.loads(content))


def dtype_named(name: str) -> torch.dtype:
    """Return ``torch.<name>`` if that is a dtype.

    Raises:
        ValueError: If this PyTorch has no dtype of that name.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"PyTorch {torch.__version__} has no dtype {name!r}")
    return dtype
