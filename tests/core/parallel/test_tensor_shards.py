from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from comfyui_ferry.core.errors import PlanError
from comfyui_ferry.core.parallel import TensorShards, largest_rank_bytes
from comfyui_ferry.core.parallel.plan import ModelPlan
from comfyui_ferry.core.parallel.tensor_plan import (
    ColumnParallel,
    GatheredColumn,
    LocalAttribute,
    RowParallel,
    TensorPlan,
    TensorRule,
    Unit,
)
from comfyui_ferry.core.parallel.tensor_shards import TensorPart
from ferry_support.toy_model import PLAN, build_toy

QKV = ColumnParallel("blocks.*.qkv_image", parts=("heads",) * 3)


def plan(*rules: TensorRule) -> ModelPlan:
    unit = Unit("heads", channels="out.in_features", count="heads")
    return replace(PLAN, tensor=TensorPlan((unit,), rules))


def shards(*rules: TensorRule, rank: int = 0, degree: int = 2) -> TensorShards:
    return TensorShards(build_toy(), plan(*rules), degree=degree, rank=rank)


def test_a_fused_weight_is_cut_part_by_part() -> None:
    """3 heads of 4 channels on 2 ranks: the second has the last head of query, key and value."""
    second = shards(QKV, rank=1)
    rows = [8, 9, 10, 11, 20, 21, 22, 23, 32, 33, 34, 35]
    weight = torch.randn(36, 12)
    taken = second.take("blocks.0.qkv_image.weight", weight)
    assert taken is not None
    assert torch.equal(taken, weight[rows])
    bias = second.take("blocks.1.qkv_image.bias", weight[:, 0])
    assert bias is not None
    assert torch.equal(bias, weight[rows, 0])
    assert second.take("blocks.0.qkv_text.weight", weight) is weight


def test_parts_of_all_ranks_are_the_whole_weight() -> None:
    weight = torch.arange(36.0 * 12).view(36, 12)
    taken = [shards(QKV, rank=r, degree=3).take("blocks.0.qkv_image.weight", weight) for r in range(3)]
    rows = torch.cat([part for part in taken if part is not None])
    assert sorted(rows[:, 0].tolist()) == weight[:, 0].tolist()


def test_a_row_parallel_bias_stays_on_the_first_rank() -> None:
    rule = RowParallel("out", parts=("heads",))
    weight, bias = torch.randn(2, 12), torch.randn(2)
    first, second = shards(rule), shards(rule, rank=1)
    assert first.take("out.bias", bias) is bias
    assert second.take("out.bias", bias) is None
    part = second.take("out.weight", weight)
    assert part is not None
    assert torch.equal(part, weight[:, 8:])


def test_adjacent_ranges_are_one_view() -> None:
    part = shards(QKV, degree=1).parts["blocks.0.qkv_image.weight"]
    assert part == TensorPart(0, 36, ((0, 36),))


def test_bytes_of_the_fullest_rank() -> None:
    model = build_toy()
    whole = sum(parameter.nbytes for parameter in model.parameters())
    one = 4 * (36 * 12 + 36)
    assert largest_rank_bytes(model, PLAN, 1) == whole
    # Two of three heads in both blocks; the other rank has one, and no bias of the last layer.
    cut = plan(QKV, RowParallel("out", parts=("heads",)))
    expected = whole - 2 * one // 3 - 4 * 2 * 4
    assert largest_rank_bytes(model.to("meta"), cut, 2) == expected


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ((ColumnParallel("blocks.*.qkv_image", parts=("heads",)),), "blocks.0.qkv_image has 36 channels"),
        ((QKV, QKV), "cuts the weights of blocks.0.qkv_image twice"),
        ((GatheredColumn("blocks.0"),), "no weight to cut|holds"),
        ((GatheredColumn("blocks.*.missing"),), "missing"),
        ((LocalAttribute("blocks.*", name="heads", unit="heads"),), "heads is None"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(rules: tuple[TensorRule, ...], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        shards(*rules)


def test_a_scale_beside_the_weight_is_refused() -> None:
    model = build_toy()
    model.out.register_buffer("input_scale", torch.ones(()))  # one number for all channels
    TensorShards(model, plan(GatheredColumn("out")), degree=2, rank=0)
    model.out.register_buffer("scale_weight", torch.ones(2))
    with pytest.raises(PlanError, match="scale_weight"):
        TensorShards(model, plan(GatheredColumn("out")), degree=2, rank=0)


def test_another_shape_than_the_models_is_refused() -> None:
    with pytest.raises(PlanError, match=r"blocks\.0\.qkv_image\.weight"):
        shards(QKV).take("blocks.0.qkv_image.weight", torch.randn(24, 12))
