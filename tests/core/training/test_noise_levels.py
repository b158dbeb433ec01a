"""Quantiles become the asked distribution, exactly and with the same random numbers."""

from __future__ import annotations

import pytest
import torch
from comfyui_ferry.core.errors import RequestError
from comfyui_ferry.core.training import NoiseLevels, shifted


@pytest.mark.parametrize("sampling", ["uniform", "logit_normal"])
def test_time_and_quantile_are_inverse_and_keep_their_ends(sampling):
    levels = NoiseLevels(sampling)
    quantiles = [0.001, 0.2, 0.5, 0.77, 0.999]
    assert [levels.quantile(levels.time(value)) for value in quantiles] == pytest.approx(quantiles, abs=1e-9)
    assert [levels.time(value) for value in (0.0, 0.5, 1.0)] == [0.0, 0.5, 1.0]
    times = [levels.time(value) for value in quantiles]
    assert times == sorted(times)


def test_logit_normal_is_the_sigmoid_of_a_standard_normal():
    times = torch.tensor([NoiseLevels("logit_normal").time(value / 2000) for value in range(1, 2000)])
    logits = torch.logit(times)
    # The extremes of 2000 quantiles are cut off, which narrows the deviation a little.
    assert abs(float(logits.mean())) < 1e-3
    assert abs(float(logits.std()) - 1.0) < 0.01


def test_a_shift_bends_towards_noise():
    assert shifted(0.5, 1.0) == 0.5
    assert shifted(0.5, 3.0) == pytest.approx(0.75)
    assert [shifted(end, 3.0) for end in (0.0, 1.0)] == [0.0, 1.0]


@pytest.mark.parametrize(
    "wrong",
    [{"sampling": ""}, {"weighting": ""}, {"shift": 0.0}, {"lowest": 0.9, "highest": 0.5}, {"highest": 2.0}],
)
def test_what_is_no_distribution_is_refused(wrong):
    with pytest.raises(RequestError):
        NoiseLevels(**wrong)
