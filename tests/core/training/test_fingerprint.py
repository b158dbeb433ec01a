"""Same data and weights, same text; anything else, another."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from comfyui_ferry.core.training import fingerprint, fingerprint_model


@dataclass
class Caption:
    entry: list
    latent: torch.Tensor


def value(**changes):
    entry = [torch.ones(1, 2, dtype=torch.bfloat16), {"guidance": 3.5, "pooled": torch.arange(3)}]
    return Caption(**({"entry": entry, "latent": torch.zeros(1, 2)} | changes))


def test_equal_values_have_one_text_and_others_another():
    base = fingerprint([value(), value()])
    assert base == fingerprint([value(), value()])
    others = [
        [value()],
        [value(), value(latent=torch.zeros(2, 1))],
        [value(), value(latent=torch.zeros(1, 2, dtype=torch.float64))],
        [value(), value(entry=[torch.ones(1, 2, dtype=torch.bfloat16), {"guidance": 3.0}])],
        [value(), value(entry=[])],
    ]
    texts = [fingerprint(other) for other in others]
    assert len({base, *texts}) == len(others) + 1


def test_an_object_in_memory_has_no_part():
    assert fingerprint({"a": object()}) == fingerprint({"a": object()})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_two_models_are_told_apart(dtype):
    def model(scale=1.0):
        torch.manual_seed(0)
        layer = torch.nn.Linear(64, 64)
        layer.weight.data.mul_(scale)
        layer.weight.data = layer.weight.data.to(dtype)
        return torch.nn.Sequential(layer)

    assert fingerprint_model(model()) == fingerprint_model(model())
    assert fingerprint_model(model()) != fingerprint_model(model(1.5))
