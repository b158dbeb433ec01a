"""Streaming on a GPU: the same bits while copies and kernels overlap, within the budget, and all of it freed.

Bitwise: the same kernels run on the same bytes, wherever these were before.
"""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from comfyui_ferry.core.offload import ModelStreamer, StreamConfig, StreamPool, WeightChange, WeightFile
from safetensors.torch import save_file
from torch import nn

pytestmark = pytest.mark.gpu

WIDTH = 2048


class Model(nn.Module):
    def __init__(self, depth: int = 12) -> None:
        super().__init__()
        self.enter = nn.Linear(64, WIDTH)
        self.layers = nn.ModuleList(Block(index % 3 + 1) for index in range(depth))

    def forward(self, x):
        x = self.enter(x)
        for layer in self.layers:
            x = x + layer(x)
        return x


class Block(nn.Module):
    """Short kernels between large copies, so that a copy that is not waited for shows."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))

    def forward(self, x):
        for part in self.parts:
            x = part(x).tanh()
        return x


def make(seed=0):
    torch.manual_seed(seed)
    model = Model().requires_grad_(False).to(torch.bfloat16)
    return model, copy.deepcopy(model).cuda()


def pool(limit_bytes=None, depth=1, ram_bytes=None):
    return StreamPool(torch.device("cuda", 0), StreamConfig(limit_bytes, ram_bytes, depth))


def x():
    return torch.randn(16, 64, device="cuda", dtype=torch.bfloat16)


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_same_bits_within_the_budget_and_freed(depth, share):
    model, plain = make()
    with torch.inference_mode():
        plain(x())  # what the libraries take for themselves
    streamer = ModelStreamer(model, pool(depth=depth))
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    budget = int(streamer.least_bytes + share * (streamer.weight_bytes - streamer.least_bytes))
    streamer.load(budget)
    torch.cuda.reset_peak_memory_stats()
    with torch.inference_mode():
        for _ in range(8):
            value = x()
            assert torch.equal(model(value), plain(value))
    assert streamer.target_bytes <= budget
    assert torch.cuda.max_memory_allocated() - before <= budget + 64 * 2**20
    stats = streamer.stats()
    assert stats.pinned_bytes >= stats.host_bytes == streamer.weight_bytes
    assert stats.pass_s > 0 and 0 <= stats.stall_share <= 1
    streamer.close()
    assert streamer.pool.pinned_bytes == 0
    gc.collect()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before + 2**20


def test_memory_is_given_back_in_the_middle_of_a_pass_and_changes_are_exact():
    model, plain = make()
    streamer = ModelStreamer(model, pool())
    streamer.load(streamer.weight_bytes)
    name, freed = "layers.5.parts.0.weight", []
    with torch.inference_mode():
        for factor in (1.0, 1.5, 0.25, 1.0):
            changes = {} if factor == 1.0 else {name: WeightChange(factor, lambda w, f=factor: w * f)}
            streamer.set_changes(changes)
            changed = copy.deepcopy(plain)
            changed.layers[5].parts[0].weight.mul_(factor)
            for index in range(4):
                handle = (
                    model.layers[6]
                    .parts[0]
                    .register_forward_pre_hook(lambda module, args: freed.append(streamer.shrink(40 * 2**20)))
                )
                value = x()
                assert torch.equal(model(value), changed(value))
                handle.remove()
                if index == 2:
                    streamer.load(streamer.weight_bytes)
    assert max(freed) >= 40 * 2**20
    streamer.close()


def test_two_models_from_files_in_one_budget(tmp_path):
    plains, streamers, models = [], [], []
    shared = None
    for seed in (1, 2):
        model, plain = make(seed)
        save_file(model.state_dict(), tmp_path / f"{seed}.safetensors")
        file = WeightFile(tmp_path / f"{seed}.safetensors")
        model.load_state_dict(file.tensors(), assign=True)
        model.requires_grad_(False)
        nbytes = sum(parameter.nbytes for parameter in model.parameters())
        shared = shared or pool(nbytes // 2, ram_bytes=nbytes // 2)
        streamers.append(ModelStreamer(model, shared, files=[file]))
        plains.append(plain)
        models.append(model)
    with torch.inference_mode():
        for turn in (0, 1, 1, 0, 0, 1):
            streamers[turn].load(2**40)
            assert sum(streamer.target_bytes for streamer in streamers) <= shared.config.vram_limit_bytes
            for _ in range(3):
                value = x()
                assert torch.equal(models[turn](value), plains[turn](value))
    assert streamers[1].stats().file_bytes > 0
