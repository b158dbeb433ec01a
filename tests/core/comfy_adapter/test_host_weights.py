"""The host holds a parallel MODEL's weights once, and gives them back as they were."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from comfyui_ferry.core.comfy_adapter import close_workers
from comfyui_ferry.core.comfy_adapter.host_weights import HostWeights
from ferry_support.sampling import (
    TOLERANCE,
    ULYSSES_2,
    difference,
    parallel,
    sample,
    with_lora,
)
from ferry_support.tiny_patchers import PATCHERS
from torch import nn

pytestmark = [pytest.mark.comfy, pytest.mark.timeout(120), pytest.mark.usefixtures("workers_of_the_test")]

KIND = "wan"


def arena_mappings() -> int:
    return Path("/proc/self/maps").read_text().count("ferry-arena")


def small_module() -> nn.Module:
    with torch.inference_mode():
        module = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(8, 8))
        module.register_buffer("table", torch.randn(50, 40))
        module.register_buffer("empty", torch.empty(0, 3))
        module[2].weight = nn.Parameter(module[2].weight.t().contiguous().t())
    module[0].bias = nn.Parameter(torch.randn(64))
    module[1].weight = module[0].weight  # one object under two names
    module[1].bias = nn.Parameter(module[0].bias.detach())  # two objects, one memory
    return module.requires_grad_(False)


def fingerprint(module: nn.Module) -> dict:
    return {
        name: (id(t), t.detach().clone(), t.stride(), t.is_inference(), t.requires_grad)
        for name, t in {
            **dict(module.named_parameters(remove_duplicate=False)),
            **dict(module.named_buffers()),
        }.items()
    }


def assert_same(now: dict, before: dict) -> None:
    assert now.keys() == before.keys()
    for name, (identity, value, *rest) in before.items():
        assert now[name][0] == identity, name
        assert torch.equal(now[name][1], value), name
        assert list(now[name][2:]) == rest, name


def test_weights_move_and_come_back_bit_for_bit():
    module, mappings = small_module(), arena_mappings()
    before = fingerprint(module)
    weights = HostWeights(module)
    assert arena_mappings() == mappings + 1
    assert module[0].weight.data_ptr() % 64 == 0
    assert module[0].bias.data_ptr() == module[1].bias.data_ptr()
    assert all(torch.equal(value[1], before[name][1]) for name, value in fingerprint(module).items())
    assert weights.refresh(module) is False
    weights.give_back(module)
    assert_same(fingerprint(module), before)
    assert module[0].bias.data_ptr() == module[1].bias.data_ptr()
    gc.collect()
    assert arena_mappings() == mappings


def test_refresh_takes_in_what_other_code_did():
    module = small_module()
    weights = HostWeights(module)
    with torch.inference_mode():
        module[0].weight.data = module[0].weight.data.clone()  # brought back from a GPU
    assert weights.refresh(module) is False
    with torch.inference_mode():
        module[0].weight.data = 2 * module[0].weight.data
    assert weights.refresh(module) is True
    assert weights.refresh(module) is False
    module[2] = nn.Linear(8, 9)
    assert weights.refresh(module) is None


def test_new_workers_find_the_weights_in_place_and_closing_gives_them_back():
    model = PATCHERS[KIND].build()
    module = model.model.diffusion_model
    before = fingerprint(module)
    patched = with_lora(model)
    modulation = "diffusion_model.head.modulation"  # beside a child's weights: ComfyUI does not patch it
    large = 9.0 * torch.ones_like(module.head.modulation)
    assert patched.add_patches({modulation: ("diff", (large,))}) == [modulation]
    expected = sample(patched, KIND)
    assert difference(sample(with_lora(model), KIND), expected) == 0
    homes = set()
    for degrees in (ULYSSES_2, {"gpus": 2, "cfg_degree": 2, "ulysses_degree": 1}):
        assert difference(sample(parallel(patched, degrees), KIND), expected) <= TOLERANCE
        homes.add(module.blocks[0].self_attn.q.weight.data_ptr())
    assert len(homes) == 1
    with torch.inference_mode():
        module.blocks[0].self_attn.q.weight.data = 0.5 * module.blocks[0].self_attn.q.weight.data
    changed = sample(model, KIND)
    assert difference(sample(parallel(model, ULYSSES_2), KIND), changed) <= TOLERANCE
    with torch.inference_mode():
        module.blocks[0].self_attn.q.weight.data = 2 * module.blocks[0].self_attn.q.weight.data
    close_workers()
    gc.collect()
    assert arena_mappings() == 0
    # ComfyUI makes new parameter objects when it takes a LoRA out, so only the values compare.
    assert all(torch.equal(value[1], before[name][1]) for name, value in fingerprint(module).items())
