"""GGUF headers: what no reader should be given is told apart in no time, before the package reads it."""

from __future__ import annotations

import struct

import pytest

pytestmark = pytest.mark.comfy

_UINT8, _UINT32, _STRING, _ARRAY, _UINT64 = 0, 4, 8, 9, 10


def text(value: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(value) if length is None else length) + value


def array(kind: int, count: int, data: bytes) -> bytes:
    return struct.pack("<IQ", kind, count) + data


def gguf(*fields: bytes, num_fields: int | None = None, tensors: int = 0, version: int = 3) -> bytes:
    count = len(fields) if num_fields is None else num_fields
    return b"GGUF" + struct.pack("<IQQ", version, tensors, count) + b"".join(fields)


def field(kind: int, value: bytes, name: bytes = b"general.name") -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def test_headers(tmp_path):
    from comfyui_ferry.core.comfy_adapter.gguf_header import check_header

    path = tmp_path / "model.gguf"
    sound = [
        field(_STRING, text(b"wan")),
        field(_UINT64, b"12345678"),
        field(_ARRAY, array(_UINT32, 2, b"12345678")),
        field(_ARRAY, array(_STRING, 2, text(b"") + text(b"token"))),
    ]
    path.write_bytes(gguf(*sound, tensors=3) + b"tensors")
    check_header(path)
    for content, reason in (
        (b"", "empty"),
        (b"GGML" + gguf()[4:], "begin with"),
        (gguf(version=1), "version is 1"),
        (gguf(version=3 << 24), "byte order"),
        (gguf(tensors=2**63), "counts 9223372036854775808 tensors"),
        (gguf(num_fields=2**40), "and 1099511627776 fields"),
        (gguf(*sound, num_fields=5), "after its end"),
        (gguf(text(b"name", 2**62)), "after its end"),
        (gguf(field(_STRING, text(b"wan", 2**63))), "after its end"),
        (gguf(field(_ARRAY, array(_UINT8, 2**60, b""))), "arrays of"),
        (gguf(field(_ARRAY, array(_UINT8, 2**20, b"few"))), "after its end"),
        (gguf(field(_ARRAY, array(_ARRAY, 2, array(_UINT8, 1, b"1")))), "kind 9"),
        (gguf(field(77, b"12345678")), "kind 77"),
    ):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=reason):
            check_header(path)
    for length in range(len(gguf(*sound))):
        path.write_bytes(gguf(*sound)[:length])
        with pytest.raises(ValueError, match=r"end|empty"):
            check_header(path)
