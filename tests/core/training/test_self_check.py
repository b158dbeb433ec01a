"""A change that must not change the output is measured."""

from __future__ import annotations

import pytest
import torch
from comfyui_ferry.core.errors import TrainingError
from comfyui_ferry.core.training import check_same_output


def test_rounding_passes():
    output = torch.randn(4, 4)
    check_same_output(output, output * (1 + 1e-6), what="x")
    check_same_output(torch.zeros(3), torch.zeros(3), what="x")


@pytest.mark.parametrize("factor", [1.01, float("nan")])
def test_a_difference_is_named(factor):
    output = torch.randn(4, 4)
    with pytest.raises(TrainingError, match="the rewrite changes the model's output"):
        check_same_output(output, output * factor, what="the rewrite")
