from __future__ import annotations

import gc
import resource

import pytest
import torch
from comfyui_ferry.core.errors import OffloadError
from comfyui_ferry.core.offload import OffloadTrainingManager, pinned_arena
from comfyui_ferry.core.offload.pinned_arena import ArenaFullError, PinnedArena
from comfyui_ferry.core.offload.segments import ALIGNMENT_BYTES
from torch import nn


def test_no_rounding_beyond_alignment():
    sizes = [17 * 2**20 + 1, 5, 64]
    arena = PinnedArena(sizes, pin=False)
    regions = [arena.allocate(size) for size in sizes]
    assert arena.allocated_bytes == 17 * 2**20 + 3 * ALIGNMENT_BYTES
    tensors = [region.tensor(0, region.nbytes) for region in regions]
    assert all(tensor.data_ptr() % ALIGNMENT_BYTES == 0 for tensor in tensors)
    for value, tensor in enumerate(tensors):
        tensor.fill_(value)
    assert [tensor.unique().tolist() for tensor in tensors] == [[0], [1], [2]]


def test_it_is_bounded():
    arena = PinnedArena([64, 64], pin=False)
    arena.allocate(64), arena.allocate(64)
    with pytest.raises(ArenaFullError, match="1 bytes were asked"):
        arena.allocate(1)


def test_memory_that_the_system_refuses_is_named_and_the_model_is_left_alone(monkeypatch):
    def refuse(nbytes):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(pinned_arena, "_map_memory", refuse)
    model = nn.Linear(3, 3)
    with pytest.raises(OffloadError, match=r"refused .* GB of host memory .*Cannot allocate"):
        OffloadTrainingManager(model, "cpu", True)
    assert type(model.__dict__["_parameters"]) is dict and model.weight.abs().sum() > 0


def test_chunks_are_bounded_and_a_large_region_has_its_own():
    one = ALIGNMENT_BYTES
    arena = PinnedArena([one - 1, one, 4 * one, 1], pin=False, chunk_bytes=2 * one)
    for size in (one - 1, one, 4 * one, 1):
        arena.allocate(size)
    assert [chunk.nbytes for chunk in arena._chunks] == [2 * one, 4 * one, one]


def test_every_tensor_has_its_own_storage():
    region = PinnedArena([256], pin=False).allocate(256)
    tensor = region.tensor(64, 100)
    assert tensor.untyped_storage().nbytes() == 100
    tensor.fill_(7)
    assert region.tensor(0, 256)[64:164].eq(7).all()


def test_memory_outlives_the_arena():
    tensor = PinnedArena([64], pin=False).allocate(64).tensor(0, 64)
    gc.collect()
    assert tensor.fill_(3).sum() == 3 * 64


def test_contains():
    arena = PinnedArena([64], pin=False)
    tensor = arena.allocate(64).tensor(0, 64)
    assert arena.contains(tensor.data_ptr())
    assert not arena.contains(torch.ones(1).data_ptr())


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_pin_that_fails_raises():
    arena = PinnedArena([64], pin=True)
    arena.allocate(64)
    with pytest.raises((OffloadError, RuntimeError, AssertionError)):
        arena.seal()


def test_filling_takes_the_model_and_one_tensor():
    """Peak memory of the process; 64 MB tensors, which the C library gives back when they are freed."""
    size, count = 64 * 2**20, 6
    model = nn.ModuleList(nn.Linear(4096, 4096, bias=False) for _ in range(count)).requires_grad_(False)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    manager = OffloadTrainingManager(model, "cpu")
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert grown < 1.5 * size
    assert manager.stats().host_bytes == count * size
