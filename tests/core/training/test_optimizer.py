"""Optimizers by name, and the check of their gradients."""

from __future__ import annotations

import pytest
import torch
from comfyui_ferry.core.training import OPTIMIZERS
from comfyui_ferry.core.training.optimizer import build_optimizer, gradients_are_finite


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_moves_its_parameters(name):
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = build_optimizer(name, [parameter], learning_rate=0.1)
    parameter.sum().backward()
    optimizer.step()
    assert (parameter < 1).all()


@pytest.mark.parametrize(("value", "finite"), [(1.0, True), (float("nan"), False), (float("inf"), False)])
def test_a_gradient_that_is_not_finite_is_seen(value, finite):
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(3)]
    parameters[0].grad = torch.tensor([0.5, -0.5])
    parameters[1].grad = torch.tensor([0.0, value])
    assert gradients_are_finite(parameters) is finite


def test_no_gradient_at_all_is_finite():
    assert gradients_are_finite([torch.nn.Parameter(torch.zeros(2))])
