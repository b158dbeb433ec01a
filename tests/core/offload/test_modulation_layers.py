from __future__ import annotations

import pytest
from comfyui_ferry.core.errors import RequestError
from comfyui_ferry.core.module_hooks import hook_names
from comfyui_ferry.core.offload import ModulationLayers, ModulationPlan, OffloadTrainingManager
from comfyui_ferry.core.offload.modulation_layers import find_layers
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(4, 8))
        self.other = nn.Linear(4, 4)


def blocks():
    return nn.Sequential(Block(), Block()).requires_grad_(False)


def test_layers_come_in_model_order_and_once():
    model = blocks()
    rules = ("1.modulation", "1"), ("*.modulation", "1"), ("0.other", "")
    found = find_layers(model, ModulationPlan(tuple(ModulationLayers(*rule) for rule in rules)))
    assert [layer.linear for layer in found] == [
        model[0].modulation[1], model[0].other, model[1].modulation[1],
    ]  # fmt: skip
    assert found[1].parent is model[0].other


@pytest.mark.parametrize(
    ("parent", "linear", "match"),
    [
        ("*.modulatoin", "1", "modulatoin"),
        ("*.modulation", "2", "'2'"),
        ("*.modulation", "", "Sequential"),
        ("*", "modulation.1", "Linear in it decides the layer's input too"),
    ],
)
def test_bad_requests_are_refused_before_anything_changes(parent, linear, match):
    model = blocks()
    with pytest.raises(RequestError, match=match):
        OffloadTrainingManager(model, "cpu", modulation=ModulationPlan((ModulationLayers(parent, linear),)))
    assert all(not hook_names(module) for module in model.modules())


@pytest.mark.parametrize("limit", [-1, float("nan"), float("inf"), True, "128"])
def test_the_limit_is_a_size(limit):
    with pytest.raises(RequestError, match="limit_mb="):
        ModulationPlan((), limit_mb=limit)


class Adapted(nn.Module):
    """As PEFT wraps a layer."""

    def __init__(self, base_layer):
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = nn.Linear(4, 2)


def test_the_base_layer_inside_an_adapter_of_peft():
    model = blocks()
    for block in model:
        block.modulation[1] = Adapted(block.modulation[1])
    plan = ModulationPlan((ModulationLayers("*.modulation", "1.base_layer"),))
    found = find_layers(model, plan)
    assert [layer.linear for layer in found] == [block.modulation[1].base_layer for block in model]
    with pytest.raises(RequestError, match="Adapted"):
        find_layers(model, ModulationPlan((ModulationLayers("*.modulation", "1"),)))
