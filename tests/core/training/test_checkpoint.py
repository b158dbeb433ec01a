"""A LoRA file is there whole and verified, or not at all."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from comfyui_ferry.core.errors import SaveError
from comfyui_ferry.core.training import read_lora, save_verified
from safetensors import safe_open

ROOT = Path(__file__).resolve().parents[3]


def accept(path):
    read_lora(path)


def tensors():
    return {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor(1.5, dtype=torch.bfloat16)}


def test_tensors_and_metadata_read_back(tmp_path):
    path = tmp_path / "lora.safetensors"
    save_verified(path, tensors(), metadata={"rank": "3"}, verify=accept)
    loaded = read_lora(path)
    assert loaded.keys() == tensors().keys()
    assert all(torch.equal(loaded[name], value) for name, value in tensors().items())
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"rank": "3"}
    assert os.listdir(tmp_path) == ["lora.safetensors"]


@pytest.mark.parametrize("error", [SaveError("refused"), KeyboardInterrupt(), OSError(5, "broken disk")])
def test_a_refused_file_is_removed(tmp_path, error):
    def refuse(path):
        assert path.exists()
        raise error

    with pytest.raises(SaveError if isinstance(error, OSError) else type(error)):
        save_verified(tmp_path / "lora.safetensors", tensors(), metadata={}, verify=refuse)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("broken", ["replace", "fsync"])
def test_a_failing_disk_leaves_nothing(tmp_path, monkeypatch, broken):
    def fail(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, broken, fail)
    with pytest.raises(SaveError, match="No space left"):
        save_verified(tmp_path / "lora.safetensors", tensors(), metadata={}, verify=accept)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("code", [errno.EIO, errno.EINVAL])
def test_a_name_that_the_disk_does_not_confirm_is_told_and_the_file_kept(tmp_path, monkeypatch, code):
    fsync, seen = os.fsync, []

    def fail(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(code, "no")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fail)
    path = tmp_path / "lora.safetensors"
    # Some file systems have no such call, which is no failure.
    expected = (
        pytest.raises(SaveError, match="is written and reads back") if code == errno.EIO else nullcontext()
    )
    with expected:
        save_verified(path, tensors(), metadata={}, verify=seen.append)
    assert seen == [path] and read_lora(path).keys() == tensors().keys()


def test_an_existing_file_is_kept(tmp_path):
    path = tmp_path / "lora.safetensors"
    path.write_bytes(b"precious")
    with pytest.raises(SaveError, match="exists already"):
        save_verified(path, tensors(), metadata={}, verify=accept)
    assert path.read_bytes() == b"precious"


def test_a_process_killed_while_writing_leaves_no_file_under_the_name(tmp_path):
    script = f"""
import importlib.util, os, sys
spec = importlib.util.spec_from_file_location(
    "comfyui_ferry", {str(ROOT / "__init__.py")!r}, submodule_search_locations=[{str(ROOT)!r}])
sys.modules["comfyui_ferry"] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
import pathlib, torch
from comfyui_ferry.core.training import save_verified
os.fsync = lambda descriptor: os._exit(9)
save_verified(pathlib.Path({str(tmp_path)!r}) / "lora.safetensors", {{"a": torch.ones(1000)}},
    metadata={{}}, verify=print)
"""
    assert subprocess.run([sys.executable, "-c", script], timeout=120, check=False).returncode == 9
    assert not (tmp_path / "lora.safetensors").exists()
    # What is left has another ending, so that no loader lists it.
    assert [Path(name).suffix for name in os.listdir(tmp_path)] == [".tmp"]


def test_a_cut_file_does_not_read(tmp_path):
    path = tmp_path / "lora.safetensors"
    save_verified(path, tensors(), metadata={}, verify=accept)
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(SaveError, match="does not read back"):
        read_lora(path)
