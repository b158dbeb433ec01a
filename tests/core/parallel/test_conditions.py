from __future__ import annotations

import pytest
from comfyui_ferry.core.parallel.conditions import applies
from comfyui_ferry.core.parallel.plan import ModuleRule
from ferry_support.toy_model import build_toy


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (ModuleRule("x"), True),
        (ModuleRule("x", having="joint"), True),
        (ModuleRule("x", having="joint.missing"), False),
        (ModuleRule("x", having="/heads"), True),
        (ModuleRule("x", having="heads"), False),
        (ModuleRule("x", lacking="/heads"), False),
        (ModuleRule("x", lacking="/missing"), True),
        (ModuleRule("x", having="/blocks.0.cross.training", lacking="missing"), False),
    ],
)
def test_conditions_of_the_module_and_of_the_model(rule: ModuleRule, expected: bool) -> None:
    model = build_toy()  # in eval mode, so `training` is false
    assert applies(rule, model.blocks[0], model) is expected
