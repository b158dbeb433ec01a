"""Models that bring a ``_tp_plan`` dictionary, read as it is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from comfyui_ferry.core.errors import PlanError, RequestError
from comfyui_ferry.core.parallel import parallelize, read_tp_plan
from ferry_support.diffusers_models import flux, flux2, qwen, qwen21
from ferry_support.parity import TOLERANCE, relative_error, world_group
from ferry_support.ranks import run_ranks
from ferry_support.tensor_parity import weight_bytes
from ferry_support.tiny_models import randomize
from torch import nn


@pytest.mark.parametrize("world_size", [2, 3])
def test_diffusers_models_equal_one_rank(world_size: int) -> None:
    """Every class of diffusers 0.42 that brings a dictionary; three heads, on two ranks unevenly.

    Flux and Flux 2 have layers over attention and feed-forward.
    """
    models = {"flux": flux(), "flux2": flux2(), "qwen": qwen(), "qwen21": qwen21()}
    for model, _ in models.values():
        randomize(model)

    def body() -> dict[str, float]:
        errors = {}
        for name, (model, inputs) in models.items():
            with torch.inference_mode():
                whole, held = model(**inputs, return_dict=False)[0], weight_bytes(model)
                handle = parallelize(model, read_tp_plan(model), tensor_group=world_group())
                output = handle.run(model, **inputs, return_dict=False)[0]
                assert weight_bytes(model) < 0.9 * held
                handle.remove()
                assert torch.equal(model(**inputs, return_dict=False)[0], whole)
            errors[name] = relative_error(output, whole)
        return errors

    for errors in run_ranks(body, world_size):
        # fp32: partial sums of the ranks in another order.
        assert errors.keys() == models.keys()
        assert max(errors.values()) <= TOLERANCE, errors


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner_dim, self.heads = 6, 3
        self.fused, self.out, self.norm = nn.Linear(4, 18), nn.Linear(6, 4), nn.LayerNorm(4)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = Attention()


def packed(*blocks: int) -> Any:
    return type("PackedColwiseParallel", (SimpleNamespace,), {})(blocks=list(blocks))


def test_a_fused_layer_is_cut_by_its_blocks() -> None:
    plan = read_tp_plan(Model(), {"attn.fused": packed(1, 1, 1), "attn.out": "rowwise"})
    assert plan.tensor is not None
    assert [rule.parts for rule in plan.tensor.rules] == [("heads of 6",) * 3, ("heads of 6",)]  # type: ignore[attr-defined]
    assert [(unit.channels, unit.count) for unit in plan.tensor.units] == [("attn.inner_dim", "attn.heads")]


@pytest.mark.parametrize(
    ("dictionary", "message"),
    [
        ({}, "Model has no _tp_plan"),
        ({"attn.norm": "colwise"}, "LayerNorm and no Linear"),
        ({"attn.out": "sequence"}, "says 'sequence' for attn.out; known are colwise"),
        ({"attn.fused": packed(1, 4)}, r"18 channels of attn.fused by blocks \[1, 4\]"),
        ({"attn.fused": packed(1, 2)}, r"a part of \['width 12'\], and no whole layer"),
        ({"attn.out": "rowwise", "attn.fused": packed(3, 2, 4)}, "fuses 4 channels with 3 heads"),
        ({"attn.fused": "colwise"}, "no layer as wide as an attention"),
        ({"attn.none": "colwise"}, "nothing matches 'none'"),
    ],
    ids=str,
)
def test_dictionaries_that_do_not_fit_are_refused(dictionary: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        read_tp_plan(Model(), dictionary)


def test_more_ranks_than_heads_are_refused() -> None:
    def body() -> None:
        model = Model()
        plan = read_tp_plan(model, {"attn.out": "rowwise"})
        with pytest.raises(RequestError, match="this model has 3"):
            parallelize(model, plan, tensor_group=world_group())

    run_ranks(body, 4)
