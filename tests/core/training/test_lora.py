"""Adapters: what they add, how they start, and what they refuse."""

from __future__ import annotations

import pytest
import torch
from comfyui_ferry.core.errors import TrainingError
from comfyui_ferry.core.training import LoraAdapters, LoraConfig, select_targets
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self, block=Block):
        super().__init__()
        self.blocks = nn.ModuleList([block() for _ in range(2)])
        self.requires_grad_(False)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def adapt(model, *, seed=0, rank=3, alpha=6.0):
    return LoraAdapters(select_targets(model), LoraConfig(rank=rank, alpha=alpha), seed=seed, device="cpu")


def fill(adapters):
    random = torch.Generator().manual_seed(7)
    for adapter in adapters.adapters().values():
        adapter.lora_up.data.copy_(0.3 * torch.randn(adapter.lora_up.shape, generator=random))


def test_training_starts_at_the_base_model():
    model, x = Model(), torch.randn(2, 5, 6)
    expected = model(x)
    with adapt(model):
        assert torch.equal(model(x), expected)


def test_output_and_gradients_equal_those_of_the_merged_weight():
    torch.manual_seed(0)
    model, x = Model(), torch.randn(2, 5, 6)
    adapters = adapt(model)
    fill(adapters)
    merged, leaves = {}, []
    for path, adapter in adapters.adapters().items():
        up = adapter.lora_up.detach().clone().requires_grad_()
        down = adapter.lora_down.detach().clone().requires_grad_()
        leaves += [down, up]
        merged[f"{path}.weight"] = model.get_submodule(path).weight + 6.0 / 3 * up @ down
    expected = torch.func.functional_call(model, merged, (x,))
    expected.square().sum().backward()
    with adapters:
        output = model(x)
        output.square().sum().backward()
    # One matmul against two: a different order of additions in fp32.
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
    for parameter, leaf in zip(adapters.parameters(), leaves, strict=True):
        torch.testing.assert_close(parameter.grad, leaf.grad, rtol=1e-4, atol=1e-4)


def test_removal_leaves_nothing():
    model = Model()
    before = {path: dict(module.__dict__) for path, module in model.named_modules()}
    keys = list(model.state_dict())
    with adapt(model):
        assert list(model.state_dict()) != keys
    assert list(model.state_dict()) == keys
    assert {path: dict(module.__dict__) for path, module in model.named_modules()} == before


def test_a_failed_install_is_undone():
    model = Model()
    keys = list(model.state_dict())
    with pytest.raises(ValueError, match="already installed"), adapt(model), adapt(model):
        pass
    assert list(model.state_dict()) == keys


def test_the_start_depends_on_seed_and_path_only():
    model = Model()
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = adapt(model).state_dict(prefix="", dtype=torch.float32)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    again = LoraAdapters(
        select_targets(model, "blocks.1.down"), LoraConfig(rank=3, alpha=6.0), seed=0, device="cpu"
    ).state_dict(prefix="", dtype=torch.float32)
    key = "blocks.1.down.lora_down.weight"
    assert torch.equal(first[key], again[key])
    assert not torch.equal(first[key], adapt(model, seed=1).state_dict(prefix="", dtype=torch.float32)[key])
    assert not torch.equal(first[key], first["blocks.0.down.lora_down.weight"])


def test_names_shapes_and_alpha_of_the_saved_tensors():
    tensors = adapt(Model()).state_dict(prefix="diffusion_model.", dtype=torch.bfloat16)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items() if ".blocks.0.up." in name}
    assert shapes == {
        "diffusion_model.blocks.0.up.lora_up.weight": (8, 3),
        "diffusion_model.blocks.0.up.lora_down.weight": (3, 6),
        "diffusion_model.blocks.0.up.alpha": (),
    }
    assert float(tensors["diffusion_model.blocks.0.up.alpha"]) == 6.0
    assert tensors["diffusion_model.blocks.0.up.lora_up.weight"].dtype == torch.bfloat16


def test_saved_tensors_are_copies():
    adapters = adapt(Model())
    tensors = adapters.state_dict(prefix="", dtype=torch.float32)
    fill(adapters)
    assert not tensors["blocks.0.up.lora_up.weight"].any()


def test_masters_stay_fp32_in_a_bf16_model():
    model = Model().bfloat16()
    with adapt(model) as adapters:
        output = model(torch.randn(2, 6, dtype=torch.bfloat16))
        output.float().sum().backward()
    assert output.dtype == torch.bfloat16
    assert all(parameter.grad.dtype == torch.float32 for parameter in adapters.parameters())


class BypassBlock(Block):
    def forward(self, x):
        return x + self.down(F.linear(x, self.up.weight, self.up.bias))


class DetachedBlock(Block):
    def forward(self, x):
        return x + self.down(F.gelu(self.up(x).detach()))


class DeadEndBlock(Block):
    """The second layer's output is thrown away, as in the text half of a last block."""

    def forward(self, x):
        self.down(self.up(x))
        return x + self.up(x)[..., :6]


def first_backward(model, adapters):
    model(torch.randn(2, 6)).square().sum().backward()
    adapters.check_first_gradients()


def test_every_adapter_of_a_sound_model_can_learn():
    model = Model()
    with adapt(model) as adapters:
        first_backward(model, adapters)
        assert len(adapters) == 4


def test_a_layer_read_without_a_call_is_named():
    model = Model(BypassBlock)
    with adapt(model) as adapters, pytest.raises(TrainingError, match=r"blocks\.0\.up: .*without calling"):
        first_backward(model, adapters)


def test_a_layer_without_gradient_is_named():
    model = Model(DetachedBlock)
    with adapt(model) as adapters, pytest.raises(TrainingError, match=r"blocks\.0\.up: no gradient"):
        first_backward(model, adapters)


def test_dead_ends_are_left_out_in_the_last_block_only():
    model = Model()
    model.blocks[1] = DeadEndBlock().requires_grad_(False)
    with adapt(model) as adapters:
        first_backward(model, adapters)
        assert list(adapters.adapters()) == ["blocks.0.up", "blocks.0.down", "blocks.1.up"]
    assert "ferry_lora" not in dict(model.blocks[1].down.named_children())
    model = Model(DeadEndBlock)
    with adapt(model) as adapters, pytest.raises(TrainingError, match=r"blocks\.0\.down: no gradient"):
        first_backward(model, adapters)
