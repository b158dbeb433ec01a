"""Tensor parallelism of every plan: real gloo processes, tiny models of ComfyUI's own classes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from comfyui_ferry.core.errors import RequestError
from comfyui_ferry.core.parallel import (
    ParallelDims,
    ParallelMethod,
    largest_rank_bytes,
    validate_model,
)
from comfyui_ferry.core.parallel.tensor_plan import GatheredColumn, RowParallel
from comfyui_ferry.core.plans import PLANS
from ferry_support.parity import TOLERANCE, plan_of, run_alone
from ferry_support.ranks import run_ranks
from ferry_support.tensor_parity import many_tensor_errors, weight_bytes
from ferry_support.tiny_cases import CASES, TinyCase
from ferry_support.tiny_models import (
    build_flux,
    build_qwen,
    build_z_image,
    flux_call,
    is_newer_comfyui,
    qwen_call,
)

pytestmark = pytest.mark.comfy

# The shared tester runs its three heads on two and three ranks, and every product with shared sequences.
FIVE_HEADS = {
    "flux, five heads": TinyCase(lambda: build_flux(hidden_size=80, num_heads=5), flux_call),
    "qwen, five heads": TinyCase(lambda: build_qwen(num_attention_heads=5), qwen_call),
    "z-image": CASES["z-image"],
}


def prepare(cases: dict[str, TinyCase]) -> dict[str, tuple]:
    prepared = {}
    for name, case in cases.items():
        if not case.newer_only or is_newer_comfyui():
            model, inputs = case.build(), case.inputs()
            prepared[name] = (model, plan_of(model), inputs, run_alone(model, inputs))
    return prepared


def check(cases: dict[str, TinyCase], *layouts: ParallelDims) -> None:
    prepared = prepare(cases)

    def body() -> list[dict[str, dict[str, Any]]]:
        return [many_tensor_errors(prepared, dims) for dims in layouts]

    for rank, by_layout in enumerate(run_ranks(body, layouts[0].world_size)):
        for dims, by_name in zip(layouts, by_layout, strict=True):
            assert by_name.keys() == prepared.keys()
            for name, what in by_name.items():
                # fp32: partial sums of the ranks in another order; below 2e-6 is seen.
                assert what["error"] <= TOLERANCE, (rank, dims, name, what)
                assert what["restored"] and what["weights"] and what["attributes"], (rank, dims, name, what)
                assert what["hooks left"] == [], (rank, dims, name)
                assert what["held"] < what["whole"], (rank, dims, name)


def test_five_heads_on_four_ranks() -> None:
    """By tensor parallel alone, and on each of two branches of CFG."""
    check(FIVE_HEADS, ParallelDims(tp=4), ParallelDims(cfg=2, tp=2))


@pytest.mark.parametrize("word", [RowParallel, GatheredColumn])
def test_a_rule_left_out_is_seen_by_the_tester(word: type) -> None:
    """The other ranks' part is missing, or the shapes do not fit."""
    model, plan, inputs, reference = prepare({"wan": CASES["wan t2v"]})["wan"]
    assert plan.tensor is not None
    rules = tuple(rule for rule in plan.tensor.rules if not isinstance(rule, word))
    broken = replace(plan, tensor=replace(plan.tensor, rules=rules))

    def rank() -> float:
        try:
            return many_tensor_errors({"wan": (model, broken, inputs, reference)}, ParallelDims(tp=2))["wan"][
                "error"
            ]
        except RuntimeError:
            return 1.0

    if word is GatheredColumn:  # every rank keeps the layer whole: right, but heavy
        assert max(run_ranks(rank, 2)) <= TOLERANCE
    else:
        assert min(run_ranks(rank, 2)) > 1e-2


def test_each_of_two_ranks_holds_about_half_of_qwen_image() -> None:
    """Modulation is a third of the bytes, so it must be cut as well; measured on the full-size model."""
    import comfy.ops
    from comfy.ldm.qwen_image.model import QwenImageTransformer2DModel

    model = QwenImageTransformer2DModel(
        in_channels=64,
        num_layers=60,
        dtype=torch.bfloat16,
        device="meta",
        operations=comfy.ops.disable_weight_init,
    )
    whole = weight_bytes(model)
    assert 40e9 < whole < 41e9
    assert largest_rank_bytes(model, plan_of(model), 2) <= 0.505 * whole
    assert largest_rank_bytes(model, plan_of(model), 4) <= 0.26 * whole


def test_degrees_that_do_not_fit_are_refused() -> None:
    model = build_z_image()
    plan = plan_of(model)
    validate_model(plan, model, ParallelDims(tp=5))
    validate_model(plan, model, ParallelDims(tp=2, ulysses=2))
    with pytest.raises(RequestError, match=r"tensor_parallel_degree=6 .* has 5\..* from 1 to 5"):
        validate_model(plan, model, ParallelDims(tp=6))
    with pytest.raises(RequestError, match=r"has 5, or 2 with tensor_parallel_degree=2"):
        validate_model(plan, model, ParallelDims(tp=2, ulysses=3))


def test_every_plan_that_declares_tensor_parallelism_has_its_rules() -> None:
    for plan in PLANS:
        assert (ParallelMethod.TENSOR in plan.methods) == (plan.tensor is not None), plan.name
