"""Saves that contradict each other are refused."""

from __future__ import annotations

import pytest
from comfyui_ferry.core.errors import RequestError

pytestmark = pytest.mark.comfy


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"prefix": "a", "every": -1}, "save_every=-1"),
        ({"prefix": "a", "keep_states": -1}, "keep_states=-1"),
        ({"every": 5}, "save_prefix=''"),
        ({"prefix": "a", "every": 5, "keep_states": 0}, "keep_states=0"),
        ({"resume_from": "latest"}, "without a save_prefix"),
    ],
)
def test_values_out_of_range_are_refused(values, named):
    from comfyui_ferry.core.comfy_adapter.training_request import SaveSettings

    with pytest.raises(RequestError, match=named):
        SaveSettings(**values)
