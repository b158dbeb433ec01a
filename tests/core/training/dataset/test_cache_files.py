"""A cache file is there whole, or it is found out."""

from __future__ import annotations

import os

import pytest
import torch
from comfyui_ferry.core.errors import SaveError
from comfyui_ferry.core.training.dataset import BrokenCacheError, CacheFolder, cache_key

KEY = cache_key("something", 1)
TENSORS = {"latent": torch.arange(24.0).view(2, 3, 4), "mask": torch.tensor([True, False])}
VALUES = {"guidance": 3.5, "nothing": None, "text": "ünïcode"}


@pytest.fixture
def files(tmp_path):
    folder = CacheFolder(tmp_path / "cache")
    folder.write(KEY, TENSORS, VALUES)
    return folder


def test_what_was_written_is_read(files):
    entry = files.read(KEY)
    assert entry.values == VALUES
    assert all(torch.equal(entry.tensors[name], tensor) for name, tensor in TENSORS.items())
    assert files.has(KEY)
    assert files.shape(KEY, "latent") == (2, 3, 4)
    assert not files.has(cache_key("something", 2))
    assert [path.name for path in files.path(KEY).parent.iterdir()] == [f"{KEY}.safetensors"]


def test_a_change_of_any_byte_is_found(files):
    path = files.path(KEY)
    content = path.read_bytes()
    # The header ends in blanks that mean nothing; everything else counts.
    for position in range(0, len(content), 7):
        changed = bytearray(content)
        changed[position] ^= 0x10
        path.write_bytes(changed)
        if content[position] != ord(" "):
            assert not files.has(KEY), position
    for broken in (content[:-1], content[:40], b""):
        path.write_bytes(broken)
        assert not files.has(KEY)
        with pytest.raises(BrokenCacheError):
            files.read(KEY)
    files.write(KEY, TENSORS, VALUES)
    assert files.has(KEY)


def test_a_file_under_another_name_is_not_taken(files):
    other = cache_key("something", 2)
    files.path(other).parent.mkdir(parents=True, exist_ok=True)
    os.replace(files.path(KEY), files.path(other))
    assert not files.has(other)


def test_a_failed_write_leaves_nothing(files, monkeypatch):
    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    other = cache_key("another")
    with pytest.raises(SaveError, match=r"could not be written \(disk full\)"):
        files.write(other, TENSORS, VALUES)
    assert list(files.path(other).parent.glob("*")) == []
    (files.folder / other[:2]).rmdir()
    (files.folder / other[:2]).write_bytes(b"a file in place of the folder")
    with pytest.raises(SaveError, match="could not be written"):
        files.write(other, TENSORS, VALUES)
