"""A change that must not change the output is measured."""

from __future__ import annotations

import pytest
import torch
from comfyui_ferry.core.errors import TrainingError
from comfyui_ferry.core.training import check_managed_bytes, check_same_output, model_bytes


def test_rounding_passes():
    output = torch.randn(4, 4)
    check_same_output(output, output * (1 + 1e-6), what="x")
    check_same_output(torch.zeros(3), torch.zeros(3), what="x")


@pytest.mark.parametrize("factor", [1.01, float("nan")])
def test_a_difference_is_named(factor):
    output = torch.randn(4, 4)
    with pytest.raises(TrainingError, match="the rewrite changes the model's output"):
        check_same_output(output, output * factor, what="the rewrite")


def test_a_part_that_is_not_managed_is_refused():
    layer = torch.nn.Linear(4, 4)
    model = torch.nn.Sequential(layer, torch.nn.BatchNorm1d(4), layer)  # tied: counted once
    size = 4 * (16 + 4) + 4 * 4 * 4 + 8
    assert model_bytes(model) == size
    check_managed_bytes(size, size)
    with pytest.raises(TrainingError, match=f"{size - 64} of the model's {size} bytes"):
        check_managed_bytes(size - 64, size)
