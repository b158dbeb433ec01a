"""What may cross to another process, and how it is written: JSON plus tensors in shared memory.

Allowed are ``None``, ``bool``, ``int``, ``float`` (nan and infinities too), ``str``, ``bytes``,
``list``, ``tuple``, ``dict``, ``torch.dtype``, ``torch.device``, ``torch.Size``, dense tensors of any
dtype on any device, and ``SharedFile``. Everything else is refused by its path. Nothing is ever
turned into code or an arbitrary object on the other side, so a message can only be data.

The written form, version 1: scalars, strings and lists are themselves; everything else is an object
with one key, its tag (``_TAGS``). A tensor is ``{"x": [offset, dtype, shape]}`` and its bytes lie at that
offset of the message's buffer, contiguous and 64-byte aligned. An object that occurs several times
is written once, and is one object again after reading.

``decoding`` reads it. A tensor arrives on the CPU, contiguous, without ``requires_grad`` and as a plain
``torch.Tensor``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch

from .shared_memory import SharedFile, align

PROTOCOL_VERSION = 1

_MAX_DEPTH = 100
_TAGS = {
    "x": "tensor: [offset, dtype, shape]",
    "b": "bytes: [offset, length]",
    "t": "tuple: [items]",
    "d": "dict: [key, value, key, value, ...]",
    "y": "torch.dtype: name",
    "v": "torch.device: name",
    "s": "torch.Size: [sizes]",
    "f": "SharedFile: [index in the message's descriptors, size]",
}


class _RefusedError(TypeError):
    """A value that may not be sent; collects its path on the way out."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.path: list[str] = []


def check_sendable(value: Any, name: str) -> None:
    """Check that a value may be sent, before there is anybody to send it to.

    Args:
        value: What is to be sent.
        name: What the error calls it.

    Raises:
        TypeError: If something in it may not be; the message names its path.
    """
    PayloadEncoder().encode(value, name)


class PayloadEncoder:
    """Writes one or more values that share one buffer, for example one payload for each rank.

    Use: ``encode`` each value, then ``write_into`` a buffer of ``size_bytes``. The values must not
    change in between.
    """

    def __init__(self) -> None:
        self.size_bytes = 0
        self.files: list[SharedFile] = []
        # The sources are kept: a dead object's id could come back as another object's.
        self._sources: list[torch.Tensor | bytes] = []
        self._offsets: list[int] = []
        self._written: dict[int, Any] = {}

    def encode(self, value: Any, name: str) -> bytes:
        """Return the written form of ``value``; its tensors are only noted.

        Args:
            value: What to send.
            name: What error messages call it, for example "payload".

        Raises:
            TypeError: If something in it may not be sent; the message names its path.
        """
        try:
            return json.dumps(self._encode(value, 0), separators=(",", ":")).encode("ascii")
        except _RefusedError as refused:
            path = name + "".join(reversed(refused.path))
            raise TypeError(f"{path} cannot be sent to a worker process: {refused.reason}.") from None

    def write_into(self, view: torch.Tensor) -> None:
        """Copy the noted tensors (from any device) and bytes into ``view``, uint8 ``[>= size_bytes]``."""
        for offset, source in zip(self._offsets, self._sources, strict=True):
            if isinstance(source, bytes):
                if source:
                    data = torch.frombuffer(bytearray(source), dtype=torch.uint8)
                    view[offset : offset + len(source)].copy_(data)
            elif source.numel():
                write_tensor(view, offset, source)

    def _encode(self, value: Any, depth: int) -> Any:
        encoder = _ENCODERS.get(type(value))
        if encoder is not None:
            if depth > _MAX_DEPTH:
                raise _RefusedError(f"it is nested deeper than {_MAX_DEPTH} levels")
            return encoder(self, value, depth + 1)
        if isinstance(value, torch.Tensor):
            raise _RefusedError(
                f"it is a tensor subclass, {type(value).__name__}, whose meaning would be lost; send "
                "the plain tensors it is made of"
            )
        raise _RefusedError(f"its type is {type(value).__module__}.{type(value).__qualname__}")

    def _scalar(self, value: Any, depth: int) -> Any:
        return value

    def _list(self, value: list, depth: int) -> list:
        items = []
        for index, item in enumerate(value):
            try:
                items.append(self._encode(item, depth))
            except _RefusedError as refused:
                refused.path.append(f"[{index}]")
                raise
        return items

    def _tuple(self, value: tuple, depth: int) -> dict:
        return {"t": self._list(list(value), depth)}

    def _dict(self, value: dict, depth: int) -> dict:
        items = []
        for key, item in value.items():
            try:
                items += [self._encode(key, depth), self._encode(item, depth)]
            except _RefusedError as refused:
                refused.path.append(f".{key}" if isinstance(key, str) else f"[{key!r}]")
                raise
        return {"d": items}

    def _dtype(self, value: torch.dtype, depth: int) -> dict:
        return {"y": str(value).removeprefix("torch.")}

    def _device(self, value: torch.device, depth: int) -> dict:
        return {"v": str(value)}

    def _size(self, value: torch.Size, depth: int) -> dict:
        return {"s": list(value)}

    def _bytes(self, value: bytes, depth: int) -> dict:
        return self._once(value, lambda: {"b": [self._reserve(value, len(value)), len(value)]})

    def _file(self, value: SharedFile, depth: int) -> dict:
        return self._once(value, lambda: {"f": [self._add_file(value), value.size_bytes]})

    def _tensor(self, value: torch.Tensor, depth: int) -> dict:
        if value.layout != torch.strided or value.is_quantized or value.is_meta:
            kind = "meta" if value.is_meta else "quantized" if value.is_quantized else str(value.layout)
            raise _RefusedError(f"it is a {kind} tensor; only dense tensors with data can be sent")
        return self._once(value, lambda: self._reserve_tensor(value))

    def _reserve_tensor(self, value: torch.Tensor) -> dict:
        offset = self._reserve(value.detach(), value.numel() * value.element_size())
        return {"x": [offset, str(value.dtype).removeprefix("torch."), list(value.shape)]}

    def _once(self, value: Any, write: Callable[[], dict]) -> dict:
        known = self._written.get(id(value))
        if known is None:
            # Kept with the result, so that the id stays this object's.
            known = self._written[id(value)] = (write(), value)
        return known[0]

    def _reserve(self, source: torch.Tensor | bytes, num_bytes: int) -> int:
        offset = self.size_bytes
        self._sources.append(source)
        self._offsets.append(offset)
        # An empty one takes a place too: the offset is what tells two objects apart.
        self.size_bytes += align(max(num_bytes, 1))
        return offset

    def _add_file(self, file: SharedFile) -> int:
        self.files.append(file)
        return len(self.files) - 1


_ENCODERS: dict[type, Callable[[PayloadEncoder, Any, int], Any]] = {
    type(None): PayloadEncoder._scalar,
    bool: PayloadEncoder._scalar,
    int: PayloadEncoder._scalar,
    float: PayloadEncoder._scalar,
    str: PayloadEncoder._scalar,
    list: PayloadEncoder._list,
    tuple: PayloadEncoder._tuple,
    dict: PayloadEncoder._dict,
    bytes: PayloadEncoder._bytes,
    torch.dtype: PayloadEncoder._dtype,
    torch.device: PayloadEncoder._device,
    torch.Size: PayloadEncoder._size,
    torch.Tensor: PayloadEncoder._tensor,
    torch.nn.Parameter: PayloadEncoder._tensor,
    SharedFile: PayloadEncoder._file,
}


def write_tensor(view: torch.Tensor, offset: int, source: torch.Tensor) -> None:
    """Copy ``source`` to ``view[offset:]``, contiguous.

    Args:
        view: uint8 ``[bytes]`` on the CPU.
        offset: In bytes, aligned.
        source: Any device, strides and dtype; at least one element.
    """
    num_bytes = source.numel() * source.element_size()
    target = view[offset : offset + num_bytes]
    source = source.detach()
    if source.is_contiguous() and not source.is_conj() and not source.is_neg():
        # As bytes: some dtypes (float4, bits) have no copy kernel of their own.
        # One element counts as contiguous with any stride, also 0 (a broadcast view), but not for `view`.
        flat = source.as_strided((source.numel(),), (1,))
        target.copy_(flat.view(torch.uint8))
    else:
        target.view(source.dtype).view(source.shape).copy_(source)
