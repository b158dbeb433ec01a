from __future__ import annotations

import torch
from comfyui_ferry.core.offload.units import has_forward, module_bytes, plan_units
from ferry_support.offload_cases import Residual, Stack
from torch import nn


def plan(model, threshold=None):
    return {unit.path: [path for path, _ in unit.owners] for unit in plan_units(model, threshold)}


def test_leaf_modules_without_a_threshold():
    model = Stack(Residual(4), nn.ReLU(), nn.Linear(4, 4))
    assert plan(model) == {
        "blocks.0.norm": ["blocks.0.norm"],
        "blocks.0.up": ["blocks.0.up"],
        "blocks.0.down": ["blocks.0.down"],
        "blocks.2": ["blocks.2"],
    }


def test_the_threshold_counts_bytes_not_parameters():
    block = Residual(4)
    size = module_bytes(block)
    assert size == 4 * sum(p.numel() for p in block.parameters())
    model = Stack(block, Residual(8))
    assert plan(model, size)["blocks.0"] == ["blocks.0.norm", "blocks.0.up", "blocks.0.down"]
    assert "blocks.0" not in plan(model, size - 1)
    half = Residual(4).to(torch.bfloat16)
    assert module_bytes(half) == size // 2


def test_a_container_without_forward_is_split_whatever_its_size():
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    assert not has_forward(model)
    assert list(plan(model, 10**9)) == ["0", "1"]


def test_orphans_form_a_unit_of_their_own_module():
    model = Stack(Residual(4))
    model.scale = nn.Parameter(torch.ones(3))
    assert plan(model)[""] == [""]


def test_a_shared_module_belongs_to_one_unit_and_shared_bytes_count_once():
    linear = nn.Linear(4, 4)
    model = Stack(linear, linear)
    assert list(plan(model)) == ["blocks.0"]
    model.again = linear
    assert module_bytes(model) == 4 * 20


def test_every_owner_is_in_exactly_one_unit():
    model = Stack(Residual(4), Residual(4), nn.MultiheadAttention(4, 2))
    for threshold in (None, 1, 600, 10**6):
        owners = [path for paths in plan(model, threshold).values() for path in paths]
        expected = [path for path, module in model.named_modules() if list(module.parameters(recurse=False))]
        assert sorted(owners) == sorted(expected)


def test_a_forward_on_the_object_counts():
    module = nn.ModuleList()
    module.forward = lambda x: x
    assert has_forward(module)


def test_a_module_apart_is_no_part_of_a_larger_unit():
    block = Residual(4)
    model = Stack(block, nn.Linear(4, 4))
    units = plan_units(model, module_bytes(block) - module_bytes(block.up), apart=[block.up])
    assert {unit.path: [path for path, _ in unit.owners] for unit in units} == {
        "blocks.0": ["blocks.0.norm", "blocks.0.down"],
        "blocks.0.up": ["blocks.0.up"],
        "blocks.1": ["blocks.1"],
    }


def nested_block():
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.SiLU(), nn.Linear(4, 4)))


def test_modules_without_tensors_move_with_the_unit_around_them():
    block = nested_block()
    model = Stack(block, Residual(64))
    whole = next(unit for unit in plan_units(model, module_bytes(block)) if unit.path == "blocks.0")
    assert set(whole.members) == {block, block[1], block[1][0]}
    assert all(unit.members == () for unit in plan_units(model, None))


def test_a_module_around_one_that_moves_apart_does_not_bring_the_unit():
    """Calling it alone must not move the rest of the block."""
    block = nested_block()
    plans = plan_units(Stack(block, Residual(64)), module_bytes(block), apart=(block[1][1],))
    whole = next(unit for unit in plans if unit.path == "blocks.0")
    assert set(whole.members) == {block[1][0]}
    assert [path for path, _ in whole.owners] == ["blocks.0.0"]
