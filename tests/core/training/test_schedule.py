"""The learning rate over a training."""

from __future__ import annotations

import pytest
from comfyui_ferry.core.training import SCHEDULES, learning_rate_factor


@pytest.mark.parametrize("name", SCHEDULES)
def test_it_rises_evenly_then_follows_its_curve(name):
    factors = [learning_rate_factor(name, step, warmup_steps=4, steps=24) for step in range(24)]
    assert factors[:4] == [0.25, 0.5, 0.75, 1.0]
    assert factors[4] == 1.0
    expected = {"constant": 1.0, "cosine": 0.5, "linear": 0.5}[name]
    assert factors[14] == pytest.approx(expected)
    assert min(factors) > 0
    assert factors[4:] == sorted(factors[4:], reverse=True)


def test_cosine_is_flat_at_both_ends():
    first, second, *_, last = [
        learning_rate_factor("cosine", step, warmup_steps=0, steps=100) for step in range(100)
    ]
    assert 1 - second < 1e-3
    assert first == 1
    assert last < 1e-3
