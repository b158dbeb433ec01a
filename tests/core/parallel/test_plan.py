from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError, fields, is_dataclass
from enum import Enum
from typing import Any

import pytest
from comfyui_ferry.core.parallel import ModelPlan
from comfyui_ferry.core.plans import PLANS
from ferry_support.toy_model import PLAN


def is_data(value: Any) -> bool:
    if is_dataclass(value):
        return all(is_data(getattr(value, field.name)) for field in fields(value))
    if isinstance(value, tuple | frozenset):
        return all(map(is_data, value))
    return value is None or isinstance(value, str | int | bool | Enum)


@pytest.mark.parametrize("plan", [PLAN, *PLANS], ids=lambda plan: plan.name)
def test_a_plan_is_plain_frozen_data(plan: ModelPlan) -> None:
    assert is_data(plan)
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert hash(plan) == hash(pickle.loads(pickle.dumps(plan)))
    with pytest.raises(FrozenInstanceError):
        plan.name = "other"  # type: ignore[misc]
