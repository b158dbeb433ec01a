from __future__ import annotations

import gc
import os

import pytest
import torch
from comfyui_ferry.core.workers import shared_memory
from comfyui_ferry.core.workers.shared_memory import BufferLender, BufferMap, SharedFile


def test_two_mappings_of_one_file_are_the_same_memory():
    file = SharedFile.create("test", 1000)
    first, second = file.map(writable=True), file.map(writable=True)
    first[7] = 42
    assert second[7] == 42
    assert second.numel() == 1000


def test_memory_outlives_the_descriptor_and_goes_with_the_last_tensor():
    file = SharedFile.create("gone-soon", 1000)
    tensor = file.map(writable=True)[10:20]
    del file
    gc.collect()
    tensor.fill_(1)
    assert "ferry-gone-soon" in open("/proc/self/maps").read()
    del tensor
    assert "ferry-gone-soon" not in open("/proc/self/maps").read()


def test_no_descriptor_is_left():
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        file = SharedFile.create("test", 64)
        file.map(writable=False)
        file.close()
        file.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_longer_file_is_seen_by_new_mappings():
    file = SharedFile.create("test", 4096)
    old = file.map(writable=True)
    file.extend(8192)
    new = file.map(writable=True, offset_bytes=4096)
    assert (old.numel(), new.numel()) == (4096, 4096)
    new.fill_(3)
    assert file.map(writable=False)[4096] == 3


def test_a_mapping_made_in_inference_mode_is_an_ordinary_tensor():
    with torch.inference_mode():
        tensor = SharedFile.create("test", 64).map(writable=True)
    tensor.fill_(1)
    assert not tensor.is_inference()


def test_a_returned_buffer_is_lent_again():
    lender = BufferLender()
    first = lender.lend(1000, 1)
    second = lender.lend(1000, 1)
    assert first.number != second.number
    lender.take_back([first.number])
    assert lender.lend(1000, 1) is first


def test_a_buffer_with_two_holders_is_free_after_the_second():
    lender = BufferLender()
    buffer = lender.lend(1000, 2)
    lender.take_back([buffer.number])
    assert lender.lend(1000, 1) is not buffer
    lender.take_back([buffer.number])
    assert lender.lend(1000, 1) is buffer


def test_a_growing_message_replaces_the_buffer_and_a_smaller_one_fits():
    lender = BufferLender()
    small = lender.lend(1000, 1)
    lender.take_back([small.number])
    large = lender.lend(1_000_000, 1)
    assert large.view.numel() >= 1_000_000
    assert lender.numbers() == {large.number}
    lender.take_back([large.number])
    assert lender.lend(10, 1) is large


def test_a_huge_buffer_is_not_kept(monkeypatch):
    monkeypatch.setattr(shared_memory, "LARGEST_KEPT_BYTES", 1 << 20)
    lender = BufferLender()
    buffer = lender.lend(2 << 20, 1)
    lender.take_back([buffer.number])
    assert lender.numbers() == set()


def test_a_map_forgets():
    buffers = BufferMap(writable=True)
    buffers.add(3, SharedFile.create("test", 64))
    assert buffers.view(3).numel() == 64
    buffers.forget([3, 4])
    with pytest.raises(KeyError):
        buffers.view(3)
