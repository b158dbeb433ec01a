"""The moving average of the weights."""

from __future__ import annotations

import pytest
import torch
from comfyui_ferry.core.training.ema import MovingAverage


def test_it_follows_the_definition():
    parameter = torch.nn.Parameter(torch.zeros(2))
    average = MovingAverage({"a": parameter}, decay=0.5)
    expected = 0.0
    for step in range(1, 30):
        parameter.data.fill_(step)
        average.update(step)
        decay = min(0.5, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * step
        assert average.values["a"][0].item() == pytest.approx(expected, rel=1e-6)
    average.apply()
    assert parameter[1].item() == pytest.approx(expected, rel=1e-6)
