from __future__ import annotations

from dataclasses import replace

import pytest
from comfyui_ferry.core.errors import PlanError, RequestError
from comfyui_ferry.core.parallel import ModelPlan
from comfyui_ferry.core.parallel.tensor_plan import TensorPlan, Unit
from comfyui_ferry.core.parallel.tensor_units import (
    SharedUnits,
    UnitShares,
    max_tensor_degree,
    refuse_without_tensor_plan,
    runs,
)
from ferry_support.toy_model import PLAN, build_toy

HEADS = Unit("heads", channels="out.in_features", count="heads")


def plan_of(unit: Unit) -> ModelPlan:
    return replace(PLAN, tensor=TensorPlan((unit,), ()))


def shared(unit: Unit, degree: int = 2) -> SharedUnits:
    return SharedUnits(build_toy(), plan_of(unit), degree)


def test_heads_that_do_not_divide_go_to_the_first_ranks() -> None:
    units = shared(HEADS)
    shares = units.at("heads", "blocks.0")
    assert (shares.width, shares.counts) == (4, (2, 1))
    assert [shares.channels(rank) for rank in range(2)] == [(0, 8), (8, 12)]
    assert (shares.share(3, 0), shares.share(24, 1)) == (2, 8)
    assert (units.local_heads(3, 0), units.local_heads(3, 1)) == (2, 1)
    with pytest.raises(PlanError, match="cannot be shared"):
        shares.share(4, 0)
    with pytest.raises(PlanError, match="no units 'mlp' for out"):
        units.at("mlp", "out")


def test_modules_may_differ_in_their_units() -> None:
    model = build_toy()
    for block, count in zip(model.blocks, (3, 2), strict=True):
        block.heads = count
    units = SharedUnits(model, plan_of(replace(HEADS, channels="cross.q.out_features", scope="blocks.*")), 2)
    assert units.at("heads", "blocks.0.cross").counts == (2, 1)
    assert units.at("heads", "blocks.1") == UnitShares(6, (1, 1))
    assert units.local_heads(2, 1) == 1
    with pytest.raises(PlanError, match="no units"):
        units.at("heads", "blocks.10")
    with pytest.raises(RequestError, match="from 1 to 2"):
        SharedUnits(model, plan_of(replace(HEADS, channels="cross.q.out_features", scope="blocks.*")), 3)


def test_a_scope_may_be_missing() -> None:
    with pytest.raises(PlanError, match="no units"):
        shared(replace(HEADS, scope="stacks.*", optional=True)).at("heads", "out")
    with pytest.raises(PlanError, match="does not resolve"):
        shared(replace(HEADS, scope="stacks.*"))


@pytest.mark.parametrize(
    ("channels", "degree", "expected"),
    [
        (12288, 4, UnitShares(64, (48, 48, 48, 48))),
        (10240, 3, UnitShares(64, (54, 53, 53))),
        (192, 2, UnitShares(32, (3, 3))),  # equal shares before long runs
        (144, 2, UnitShares(16, (5, 4))),  # multiples of 16 before equal shares
        (48, 2, UnitShares(8, (3, 3))),  # unless one rank would have a third more
        (30, 4, UnitShares(2, (4, 4, 4, 3))),
        (2, 3, UnitShares(1, (1, 1, 0))),
    ],
)
def test_feed_forward_channels_are_dealt_out_in_runs(
    channels: int, degree: int, expected: UnitShares
) -> None:
    assert runs(channels, degree) == expected


def test_fewer_heads_than_ranks_are_refused_with_the_numbers() -> None:
    shared(HEADS, 3)
    with pytest.raises(RequestError, match=r"tensor_parallel_degree=4 .* whole heads.* 3\..* 1 to 3"):
        shared(HEADS, 4)


def test_the_most_ranks_that_can_share_a_model() -> None:
    assert max_tensor_degree(build_toy(), plan_of(HEADS)) == 3
    assert max_tensor_degree(build_toy(), PLAN) == 1


def test_a_plan_without_tensor_parallelism_is_refused() -> None:
    with pytest.raises(RequestError, match="tensor_parallel_degree=2 was asked for Toy"):
        refuse_without_tensor_plan(PLAN, 2)


@pytest.mark.parametrize(
    ("unit", "message"),
    [
        (Unit("heads", channels="out.missing", count="heads"), "out.missing"),
        (Unit("heads", channels="out.in_features", count="missing"), "'missing' is no number"),
        (Unit("heads", channels=("out.in_features", "out.out_features"), count="out.in_features"), ""),
        (Unit("heads", channels="out.out_features", count="heads"), "2 channels are not 3 whole heads"),
    ],
)
def test_a_unit_that_does_not_fit_the_model(unit: Unit, message: str) -> None:
    if not message:  # channels of several attributes are multiplied
        assert shared(unit).at("heads", "").width == 2
        return
    with pytest.raises(PlanError, match=message):
        shared(unit)
