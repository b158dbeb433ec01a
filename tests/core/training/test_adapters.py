"""Each adapter is the formula in its docstring, starts at the bare layer, and learns from the first step."""

from __future__ import annotations

import pytest
import torch
from comfyui_ferry.core.errors import RequestError
from comfyui_ferry.core.training import ALGORITHMS
from comfyui_ferry.core.training.adapters import check_layer
from torch import nn

RANK, ALPHA = 3, 6.0


def layer():
    torch.manual_seed(0)
    return nn.Linear(24, 40).requires_grad_(False)


def adapter(name, base, rank=RANK):
    made = ALGORITHMS[name](24, 40, rank=rank, alpha=ALPHA)
    made.start(torch.Generator().manual_seed(1), base)
    return made


def fill(made):
    random = torch.Generator().manual_seed(2)
    for parameter in made.parameters():
        parameter.data += 0.2 * torch.randn(parameter.shape, generator=random)
    return made


def weight_of(name, made, base):
    """The changed weight, written out."""
    values = dict(made.named_parameters())
    scale = ALPHA / made.rank
    if name in ("LoRA", "DoRA"):
        changed = base.weight + scale * values["lora_up"] @ values["lora_down"]
        if name == "DoRA":
            changed = changed * values["dora_scale"] / changed.norm(dim=0, keepdim=True).detach()
        return changed
    if name == "LoHa":
        first, second = (values[f"hada_w{i}_a"] @ values[f"hada_w{i}_b"] for i in (1, 2))
        return base.weight + scale * first * second
    second = values.get("lokr_w2")
    if second is None:
        second = scale * values["lokr_w2_a"] @ values["lokr_w2_b"]
    return base.weight + torch.kron(values["lokr_w1"], second)


CASES = [*((name, RANK) for name in ALGORITHMS), ("LoKr", 64)]


@pytest.mark.parametrize(("name", "rank"), CASES)
def test_output_and_gradients_are_those_of_the_changed_weight(name, rank):
    base, x = layer(), torch.randn(2, 5, 24, generator=torch.Generator().manual_seed(3))
    made = fill(adapter(name, base, rank))
    assert hasattr(made, "lokr_w2") is (name == "LoKr" and rank == 64)
    x1, x2 = x.clone().requires_grad_(), x.clone().requires_grad_()
    actual = made.around(base, base, x1)
    actual.square().sum().backward()
    found = {key: parameter.grad.clone() for key, parameter in made.named_parameters()}
    made.zero_grad(set_to_none=True)
    expected = nn.functional.linear(x2, weight_of(name, made, base), base.bias)
    expected.square().sum().backward()
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(x1.grad, x2.grad, rtol=1e-4, atol=1e-4)
    for key, parameter in made.named_parameters():
        torch.testing.assert_close(found[key], parameter.grad, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(("name", "rank"), CASES)
def test_it_starts_at_the_bare_layer_and_can_learn(name, rank):
    base, x = layer(), torch.randn(2, 24)
    made = adapter(name, base, rank)
    again = adapter(name, base, rank)
    assert all(torch.equal(a, b) for a, b in zip(made.parameters(), again.parameters(), strict=True))
    output = made.around(base, base, x)
    assert torch.equal(output, base(x))
    output.square().sum().backward()
    assert made.zero_parameter().grad.any()
    assert not made.zero_parameter().any()
    assert made.file_names.keys() >= dict(made.named_parameters()).keys()


def test_a_quantized_weight_is_refused_where_its_values_are_needed():
    scaled = layer()
    scaled.scale_weight = nn.Parameter(torch.ones(()), requires_grad=False)
    for name in ALGORITHMS:
        if name == "DoRA":
            with pytest.raises(RequestError, match=r"the layer blocks\.0\.q.*quantized"):
                check_layer(name, "blocks.0.q", scaled)
        else:
            check_layer(name, "blocks.0.q", scaled)
