"""Optimizers by name, and the check of their gradients."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from comfyui_ferry.core.errors import RequestError
from comfyui_ferry.core.training import OPTIMIZERS, TrainingConfig
from comfyui_ferry.core.training.optimizer import (
    build_optimizer,
    check_device,
    gradient_norm,
    gradients_are_finite,
    scale_gradients,
)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_moves_its_parameters(name):
    kind = OPTIMIZERS[name]
    if kind.package and importlib.util.find_spec(kind.package) is None:
        pytest.skip(f"needs {kind.package}")
    if kind.needs_gpu:
        pytest.skip("needs a GPU")
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = build_optimizer(name, [parameter], learning_rate=0.1)
    if kind.averages_weights:
        optimizer.train()
    for _ in range(3):
        parameter.grad = torch.ones(3)
        optimizer.step()
    assert (parameter < 1).all()


def test_a_package_that_is_missing_is_named_with_the_line_that_installs_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for name, kind in OPTIMIZERS.items():
        if kind.package:
            with pytest.raises(RequestError, match=f"pip install {kind.package}"):
                TrainingConfig(steps=2, learning_rate=1e-3, optimizer=name)
        else:
            TrainingConfig(steps=2, learning_rate=1e-3, optimizer=name)


def test_an_optimizer_for_gpus_is_refused_on_the_host():
    check_device("AdamW", "cpu")
    check_device("AdamW8bit", "cuda")
    with pytest.raises(RequestError, match="on GPUs only"):
        check_device("AdamW8bit", "cpu")


@pytest.mark.parametrize(
    ("value", "finite"), [(1.0, True), (float("nan"), False), (float("inf"), False), (1e30, False)]
)
def test_a_gradient_that_is_not_finite_or_overflows_squared_is_seen(value, finite):
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(3)]
    parameters[0].grad = torch.tensor([0.5, -0.5])
    parameters[1].grad = torch.tensor([0.0, value])
    assert gradients_are_finite(parameters) is finite


def test_no_gradient_at_all_is_finite():
    assert gradients_are_finite([torch.nn.Parameter(torch.zeros(2))])


def test_gradients_are_scaled_together():
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    parameters[0].grad, parameters[1].grad = torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0])
    assert gradient_norm(parameters) == 5.0
    scale_gradients(parameters, 0.5)
    assert parameters[1].grad.tolist() == [0.0, 2.0]
