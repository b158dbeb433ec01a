from __future__ import annotations

import pytest
from comfyui_ferry.core.errors import RequestError
from comfyui_ferry.core.plans import PLANS, find_plan


def test_every_plan_is_found_by_its_class() -> None:
    assert len({plan.class_path for plan in PLANS}) == len(PLANS)
    for plan in PLANS:
        assert find_plan(plan.class_path) is plan


@pytest.mark.parametrize("class_path", ["comfy.ldm.wan.model.VaceWanModel", "comfy.ldm.modules.Unknown"])
def test_other_classes_are_refused_by_name(class_path: str) -> None:
    with pytest.raises(RequestError) as caught:
        find_plan(class_path)
    assert class_path in str(caught.value)
    for plan in PLANS:
        assert plan.class_path in str(caught.value)
