"""One host copy for several processes: real ones, over gloo."""

from __future__ import annotations

import gc
import os

import pytest
import torch
import torch.distributed as dist
from comfyui_ferry.core.errors import OffloadError, RequestError
from comfyui_ferry.core.offload import OffloadTrainingManager, SharedMasters
from ferry_support.ranks import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

WIDTH, BLOCKS = 32, 3


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.adapter = nn.Linear(WIDTH, WIDTH, bias=False)
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x):
        return x + torch.tanh(self.base(x) * self.scale) + self.adapter(x)


class Model(nn.Module):
    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


BASE_BYTES = BLOCKS * (WIDTH * WIDTH + WIDTH) * 4


def batch(index):
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(index))


def loss_of(model, index):
    return model(batch(index)).square().mean()


def gradients(model):
    return [p.grad.clone() for p in model.parameters() if p.requires_grad]


def rank(on_host, threshold_mb):
    """Two steps of data-parallel training; returns the gradients and where the base weights lie."""
    handle = [None]
    if dist.get_rank() == 0:
        memory = SharedMasters.create()
        model = Model()
        manager = OffloadTrainingManager(model, "cpu", on_host, threshold_mb, shared_masters=memory)
        handle = [memory.handle]
    dist.broadcast_object_list(handle)
    if dist.get_rank() == 1:
        # Other values: what it computes with can only come from the shared memory.
        model = Model(seed=1)
        for block in model.blocks:
            nn.init.zeros_(block.base.weight)
        memory = SharedMasters.open(handle[0])
        manager = OffloadTrainingManager(model, "cpu", on_host, threshold_mb, shared_masters=memory)
    for parameter in model.parameters():
        if parameter.requires_grad:
            value = parameter.detach().clone()
            dist.broadcast(value, 0)
            with torch.no_grad():
                parameter.copy_(value)
    for step in range(2):
        (loss_of(model, 2 * step + dist.get_rank()) / 2).backward()
        manager.after_backward()
    for parameter in model.parameters():
        if parameter.requires_grad:
            dist.all_reduce(parameter.grad)
    files = [line.split()[-2:] for line in open("/proc/self/maps") if "ferry-masters" in line]
    result = gradients(model), len(files), [block.base.weight.clone() for block in model.blocks]
    dist.barrier()
    manager.remove()
    return *result, through_a_reducer(on_host)


def through_a_reducer(on_host):
    """Gradients by DistributedDataParallel, or its refusals where it would find none to reduce."""
    model = Model()
    wrapped = DistributedDataParallel(model)
    if not on_host:
        with OffloadTrainingManager(wrapped, "cpu") as manager:
            loss_of(wrapped, dist.get_rank()).backward()
            manager.after_backward()
        return gradients(model)
    with pytest.raises(RequestError, match="a DistributedDataParallel"):
        OffloadTrainingManager(wrapped, "cpu", True)
    with OffloadTrainingManager(model, "cpu", True):
        with pytest.raises(OffloadError, match="was called by DistributedDataParallel"):
            loss_of(wrapped, 0)
        loss_of(model, 0).backward()  # by itself
    return gradients(model)


@pytest.mark.parametrize("on_host, threshold_mb", [(False, None), (True, 1.0)])
def test_data_parallel_gradients_are_those_of_one_process(on_host, threshold_mb):
    """Frozen weights are common also in blocks that move as a whole, with what is trained in them.

    1e-6 relative: the same terms, added in another order.
    """
    plain = Model()
    for index in range(4):
        (loss_of(plain, index) / 2).backward()
    other = Model()
    ((loss_of(other, 0) + (loss_of(other, 0) if on_host else loss_of(other, 1))) / 2).backward()
    for found, num_mappings, bases, others in run_ranks(rank, 2, on_host, threshold_mb):
        for actual, expected in zip(others, gradients(other), strict=True):
            assert (actual - expected).norm() <= 1e-6 * expected.norm()
        assert num_mappings >= 1
        for actual, expected in zip(found, gradients(plain), strict=True):
            assert (actual - expected).norm() <= 1e-6 * expected.norm()
        for base, block in zip(bases, plain.blocks, strict=True):
            assert torch.equal(base, block.base.weight)


def test_the_second_manager_finds_the_weights_and_copies_nothing():
    memory = SharedMasters.create()
    first, second = Model(), Model(seed=1)
    expected = first(batch(0)).detach()
    with OffloadTrainingManager(first, "cpu", shared_masters=memory) as one:
        with OffloadTrainingManager(second, "cpu", shared_masters=SharedMasters.open(memory.handle)) as other:
            with torch.no_grad():
                for mine, its in zip(first.blocks, second.blocks, strict=True):
                    its.adapter.weight.copy_(mine.adapter.weight)
            assert torch.equal(second(batch(0)), expected)
            base = first.blocks[0].base.weight
            assert second.blocks[0].base.weight.data_ptr() != base.data_ptr()
            with torch.no_grad():
                base.mul_(2)
            assert torch.equal(second.blocks[0].base.weight, base)  # the same bytes, mapped twice
            assert first.blocks[0].scale.data_ptr() and one.stats().host_bytes >= BASE_BYTES
            assert other.stats().host_bytes == one.stats().host_bytes
    # Removed, each model has its own tensors again, with what was there.
    assert torch.equal(second.blocks[0].base.weight, first.blocks[0].base.weight)


def test_another_model_too_early_or_too_late_is_refused():
    memory = SharedMasters.create()
    with pytest.raises(RequestError, match="filled them yet"):
        SharedMasters.open(memory.handle)
    with OffloadTrainingManager(Model(), "cpu", shared_masters=memory):
        with pytest.raises(OffloadError, match="another model"):
            OffloadTrainingManager(
                nn.Linear(4, 4).requires_grad_(False), "cpu", shared_masters=SharedMasters.open(memory.handle)
            )
        with pytest.raises(OffloadError, match="in use by another"):
            OffloadTrainingManager(Model(), "cpu", shared_masters=memory)
    handle = memory.handle
    del memory
    gc.collect()
    pipe, end = os.pipe()
    for other in (handle, f"/proc/self/fd/{pipe}", None):
        with pytest.raises(RequestError, match="cannot be opened"):
            SharedMasters.open(other)
    os.close(pipe), os.close(end)
