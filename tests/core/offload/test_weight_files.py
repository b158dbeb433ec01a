"""Safetensors files: what is sound is read bit for bit, what is not is refused before it costs anything."""

from __future__ import annotations

import json
import os

import pytest
import torch
from comfyui_ferry.core.errors import OffloadError, RequestError
from comfyui_ferry.core.offload import WeightFile
from safetensors.torch import save_file

TENSORS = {
    "a": torch.arange(6, dtype=torch.float32).view(2, 3),
    "b": torch.randn(5).to(torch.bfloat16),
    "c": torch.randn(3, 1, 4).to(torch.float8_e4m3fn),
    "d": torch.tensor(7, dtype=torch.int64),
    "e": torch.empty(0, 4),
}


def write(path, header, data=b"\0" * 64):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def test_reads_what_was_saved(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path, metadata={"format": "pt"})
    file = WeightFile(path)
    tensors = file.tensors()
    assert file.metadata == {"format": "pt"} and set(tensors) == set(TENSORS)
    for name, expected in TENSORS.items():
        assert tensors[name].dtype == expected.dtype
        assert torch.equal(tensors[name].float(), expected.float()) and tensors[name].shape == expected.shape
    destination = torch.zeros(24, dtype=torch.uint8)
    assert file.read(tensors["a"].data_ptr(), destination)
    assert torch.equal(destination.view(torch.float32).view(2, 3), TENSORS["a"])
    assert not file.read(destination.data_ptr(), destination)
    # A tensor may start anywhere in a file of another writer.
    odd = WeightFile(write(tmp_path / "odd", {"x": entry()}, TENSORS["a"].numpy().tobytes()[4:12]))
    assert torch.equal(odd.tensors()["x"], torch.tensor([1.0, 2.0]))


@pytest.mark.parametrize("through", [lambda x: x, lambda x: x.narrow(0, 1, 1), lambda x: x.detach()])
def test_what_somebody_wrote_to_is_the_files_no_more(tmp_path, through):
    save_file({name: torch.full((4, 2), float(index)) for index, name in enumerate("abc")}, tmp_path / "x")
    file = WeightFile(tmp_path / "x")
    tensors = file.tensors()
    with torch.inference_mode():
        through(tensors["b"])[:] = 9.0
    destination = torch.zeros(32, dtype=torch.uint8)
    for name, is_whole in (("a", True), ("b", False), ("c", True)):
        assert file.holds(tensors[name]) == is_whole == file.read(tensors[name].data_ptr(), destination)
        inner = tensors[name][1:]
        assert file.holds(inner) == is_whole == file.read(inner.data_ptr(), destination[:24])


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (b"", "JSON"),
        (b"[1]", "no JSON object"),
        (b"\xff\xfe", "JSON"),
        (b"[" * 100_000, "JSON"),
        (b'{"x": 1, "x": 2}', "twice"),
        ({"__metadata__": {"a": 1}}, "metadata"),
        ({"x": 5}, "no known dtype"),
        ({"x": entry(dtype="F31")}, "no known dtype"),
        ({"x": entry(shape=(-2,))}, "whole numbers"),
        ({"x": entry(shape=(2.0,))}, "whole numbers"),
        ({"x": entry(shape=(True, 2))}, "whole numbers"),
        ({"x": entry(shape=(0, 2**62), offsets=(0, 0))}, "whole numbers"),
        ({"x": entry(shape=(1,) * 40)}, "whole numbers"),
        ({"x": entry(shape=(3,))}, "has 8 bytes"),
        ({"x": entry(offsets=(8, 0))}, "has -8 bytes"),
        ({"x": entry(), "y": entry(offsets=(4, 12))}, "shares bytes"),
        ({"x": entry(shape=(2**40,), offsets=(0, 2**42))}, "not whole"),
    ],
    ids=str,
)
def test_refuses_what_is_not_sound(tmp_path, header, reason):
    path = write(tmp_path / "bad.safetensors", header)
    open_files = len(os.listdir("/proc/self/fd"))
    with pytest.raises(RequestError, match=rf"bad\.safetensors.*{reason}"):
        WeightFile(path)
    assert len(os.listdir("/proc/self/fd")) == open_files


def test_refuses_what_is_not_whole(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path)
    whole = path.read_bytes()
    for length in (0, 7, 8, 40, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(RequestError, match="not whole"):
            WeightFile(path)
    path.write_bytes((2**62).to_bytes(8, "little") + whole[8:])
    with pytest.raises(RequestError, match="not whole"):
        WeightFile(path)
    path.write_bytes(whole)
    file = WeightFile(path)
    address = file.tensors()["a"].data_ptr()
    taken = torch.zeros(24, dtype=torch.uint8)
    assert file.read(address, taken)
    written_ns = path.stat().st_mtime_ns
    for spoil in (lambda: os.truncate(path, 60), lambda: path.write_bytes(whole)):
        spoil()
        os.utime(path, ns=(written_ns, written_ns + (path.stat().st_size == len(whole))))
        with pytest.raises(OffloadError, match="written to"):
            file.read(address, taken)
    os.mkfifo(tmp_path / "pipe.safetensors")  # opening it would wait for a writer
    for name in ("absent", "pipe", "no\0file", "\ud800", "long" * 100):
        with pytest.raises(RequestError, match="opened"):
            WeightFile(tmp_path / f"{name}.safetensors")


def test_every_dtype_that_the_format_has_is_read_bit_for_bit(tmp_path):
    kinds = ["float64", "float32", "float16", "bfloat16", "complex64", "bool"]
    kinds += [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
    kinds += ["float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float8_e4m3fnuz", "float8_e5m2fnuz"]
    raw = torch.arange(48, dtype=torch.uint8)
    state = {
        kind: raw.clone().view(getattr(torch, kind))
        for kind in kinds
        if kind != "bool" and hasattr(torch, kind)
    }
    state["bool"] = raw % 2 == 0
    save_file(state, tmp_path / "all.safetensors")
    found = WeightFile(tmp_path / "all.safetensors").tensors()
    assert found.keys() == state.keys()
    for kind, tensor in state.items():
        assert found[kind].dtype == tensor.dtype
        assert torch.equal(found[kind].view(torch.uint8), tensor.view(torch.uint8))
