"""One bad step is skipped, two go back, many end the training; the layer is named."""

from __future__ import annotations

import pytest
import torch
from comfyui_ferry.core.errors import TrainingError
from comfyui_ferry.core.training.nan_guard import GIVE_UP_AFTER, NanGuard, Trouble, find_layer
from torch import nn


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        self.last = nn.Linear(2, 2)

    def forward(self, x, *, mask=None):
        return self.last(self.first(x))


def test_the_innermost_layer_that_makes_it_is_named():
    model = Layers()
    model.first[1].bias.data[0] = float("nan")
    # A mask of minus infinity is not the culprit.
    mask = torch.full((1,), -torch.inf)
    assert find_layer(model, lambda: model(torch.ones(1, 2), mask=mask)) == "the output of first.1"
    assert not model.first[1]._forward_hooks
    assert find_layer(model, lambda: model(torch.full((1, 2), torch.nan))) == "the input of first.0"
    model.first[1].bias.data.zero_()
    assert "the loss itself" in find_layer(model, lambda: model(torch.ones(1, 2)))


def test_skip_then_go_back_then_give_up():
    state = {"value": 1}
    guard = NanGuard(lambda: dict(state), lambda taken: state.update(taken))
    trouble = Trouble("the loss", "the output of first")

    def fail():
        return guard.failed(trouble, step=7, steps=9, learning_rate=1.0)

    assert guard.good is None
    guard.passed(3, attempt=4)
    state["value"] = 2
    assert "the step is skipped" in fail()
    assert state["value"] == 2
    assert "back at step 3" in fail()
    assert state["value"] == 1
    guard.passed(8, attempt=9)
    assert guard.good == ({"value": 1}, 3, 4)
    for _ in range(GIVE_UP_AFTER - 1):
        fail()
    with pytest.raises(TrainingError, match=r"the loss of step 8 of 9 .* the output of first, 5 times"):
        fail()
