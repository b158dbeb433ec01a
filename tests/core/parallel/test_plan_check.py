from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from comfyui_ferry.core.errors import PlanError, RequestError
from comfyui_ferry.core.parallel import (
    ModelPlan,
    ParallelDims,
    ParallelMethod,
    check_plan,
    head_count,
    validate_model,
)
from comfyui_ferry.core.parallel.context_parallel import ContextParallelHook
from comfyui_ferry.core.parallel.plan import (
    Gather,
    LocalAttention,
    LocalIndex,
    ModuleRule,
    Replicated,
    SelfAttention,
    Shard,
    Split,
)
from ferry_support.toy_model import PLAN, ToyModel
from torch import nn


def without(argument: str) -> ModelPlan:
    rules = tuple(
        replace(rule, inputs=tuple(action for action in rule.inputs if action.argument != argument))
        for rule in PLAN.rules
    )
    return replace(PLAN, rules=rules)


def with_rules(*rules: ModuleRule) -> ModelPlan:
    return replace(PLAN, rules=(*PLAN.rules, *rules))


def test_a_fitting_plan_resolves_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = ToyModel()
    paths = {actions.path for actions in check_plan(model, PLAN)}
    assert {"blocks.0", "blocks.1", "blocks.1.joint", "blocks.0.cross", "out"} <= paths
    assert head_count(PLAN, model) == 3


def test_rules_for_one_module_act_in_plan_order() -> None:
    first = check_plan(ToyModel(), PLAN)[0]
    assert first.path == "blocks.0"
    assert [type(action).__name__ for action, _ in first.inputs[:4]] == ["Split", "Split", "Local", "Local"]


@pytest.mark.parametrize("argument", ["position", "frames", "cut", "rows", "memory", "mask"])
def test_an_argument_left_out_is_refused(argument: str) -> None:
    with pytest.raises(PlanError, match=rf"does not say what happens to \['{argument}'\] of blocks.0"):
        check_plan(ToyModel(), without(argument))


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (replace(PLAN, class_path="other.Model"), "is for other.Model, but the model is ferry_support"),
        (replace(PLAN, heads="out.bias"), "'out.bias' is no number of heads"),
        (with_rules(ModuleRule("layers.*")), "nothing matches 'layers'"),
        (with_rules(ModuleRule("blocks.*", (Replicated("rope"),))), "names the argument 'rope'"),
        (with_rules(ModuleRule("blocks.*", (Shard("mask", ("audio",)),))), "'audio'.* used but never opened"),
        (with_rules(ModuleRule("blocks.0", (Split("mask", "audio"),))), "'audio'.* opened but never closed"),
        (with_rules(ModuleRule("out", gather=Gather(("audio",)))), "gathered but never opened"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_plan_that_does_not_fit_is_refused(plan: ModelPlan, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        check_plan(ToyModel(), plan)


def test_an_optional_argument_may_be_missing() -> None:
    check_plan(ToyModel(), with_rules(ModuleRule("blocks.*", (LocalIndex("newer", "image", optional=True),))))


def test_rules_apply_by_what_a_module_or_the_model_has() -> None:
    model = ToyModel()
    model.blocks[1].extra = True  # type: ignore[assignment]
    model.blocks[0].extra = False  # type: ignore[assignment]
    two = (SelfAttention(("text", "image")), LocalAttention())
    for rule, expected in (
        (ModuleRule("blocks.*", attention=two, having="extra"), {"blocks.1"}),
        (ModuleRule("blocks.*", attention=two, lacking="extra"), {"blocks.0"}),
        (ModuleRule("blocks.*", attention=two, having="cross.kv"), {"blocks.0", "blocks.1"}),
        (ModuleRule("blocks.*", attention=two, having="/blocks.1.extra"), {"blocks.0", "blocks.1"}),
        (ModuleRule("blocks.*", attention=two, lacking="/blocks.1.extra"), set()),
    ):
        found = check_plan(model, with_rules(rule))
        assert {actions.path for actions in found if actions.attention == two} == expected


def test_an_optional_rule_may_match_nothing() -> None:
    check_plan(ToyModel(), with_rules(ModuleRule("layers.*", optional=True)))


class StarBlock(nn.Module):
    def forward(self, *args, **kwargs):
        return args[0]


def test_a_call_that_brings_more_than_the_plan_names_is_refused() -> None:
    model = ToyModel()
    model.blocks.append(StarBlock())
    rules = (
        *PLAN.rules[:1],
        *(replace(rule, path=rule.path.replace("blocks.*", "blocks.0")) for rule in PLAN.rules[1:]),
        ModuleRule("blocks.2", inputs=(Replicated("args[0]"), Replicated("scale"))),
    )
    (star,) = [found for found in check_plan(model, replace(PLAN, rules=rules)) if found.path == "blocks.2"]
    hook = ContextParallelHook(star, lambda: object())  # type: ignore[arg-type]
    one = torch.ones(1)
    assert hook.run(model.blocks[2].forward, model.blocks[2], (one,), {"scale": 2}) is one
    with pytest.raises(PlanError, match=r"blocks.2 was called with \['args\[1\]', 'pe'\]"):
        hook.run(model.blocks[2].forward, model.blocks[2], (one, one), {"pe": one})


def test_validate_model_accepts_what_fits() -> None:
    validate_model(PLAN, ToyModel(), ParallelDims(ulysses=3))


def test_more_ranks_than_heads_is_refused_with_the_numbers() -> None:
    with pytest.raises(RequestError, match=r"ulysses_degree=4.*has 3\..*from 1 to 3"):
        validate_model(PLAN, ToyModel(), ParallelDims(ulysses=4))


def test_ring_has_no_head_limit_but_must_be_proven() -> None:
    proven = replace(PLAN, methods=PLAN.methods | {ParallelMethod.RING})
    validate_model(proven, ToyModel(), ParallelDims(ring=7))
    validate_model(proven, ToyModel(), ParallelDims(ring=7, ulysses=3))
    with pytest.raises(RequestError, match=r"ulysses_degree=4"):
        validate_model(proven, ToyModel(), ParallelDims(ring=2, ulysses=4))
    with pytest.raises(RequestError, match=r"ring_degree=2 was asked for Toy.*ulysses only"):
        validate_model(PLAN, ToyModel(), ParallelDims(ring=2))


def test_a_method_that_is_not_proven_is_refused() -> None:
    with pytest.raises(RequestError, match=r"cfg_degree=2 was asked for Toy.*ulysses only"):
        validate_model(PLAN, ToyModel(), ParallelDims(cfg=2))
