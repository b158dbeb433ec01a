"""The loss of a denoiser is the loss of its network's output."""

from __future__ import annotations

import pytest
import torch
from comfyui_ferry.core.training import LOSSES, RectifiedFlow, sample_losses
from torch.nn import functional as F


@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("MSE", F.mse_loss),
        ("L1", F.l1_loss),
        ("Huber", F.huber_loss),
        ("SmoothL1", F.smooth_l1_loss),
    ],
)
def test_a_flow_learns_the_velocity(name, reference):
    torch.manual_seed(0)
    clean, noise = torch.randn(3, 4, 5, 6), torch.randn(3, 4, 5, 6)
    positions = torch.tensor([0.05, 0.5, 0.95])
    predicted = torch.randn(3, 4, 5, 6)
    process = RectifiedFlow(lambda noisy, t, conditions: predicted)
    losses = sample_losses(process, clean, [None] * 3, noise=noise, positions=positions, loss=LOSSES[name])
    expected = [reference(predicted[row], noise[row] - clean[row]) for row in range(3)]
    # The velocity is recovered from the clean estimate by a division by t: a few ulps over 0.05.
    torch.testing.assert_close(losses, torch.stack(expected), rtol=1e-4, atol=1e-6)


def test_each_sample_keeps_its_condition():
    seen = {}

    def velocity(noisy, t, conditions):
        seen.update(zip(conditions, t.tolist(), strict=True))
        return torch.zeros_like(noisy)

    zeros = torch.zeros(2, 1, 2, 2)
    sample_losses(
        RectifiedFlow(velocity), zeros, ["a", "b"], noise=zeros, positions=torch.tensor([0.25, 0.75]),
        loss=LOSSES["MSE"],
    )  # fmt: skip
    assert seen == {"a": 0.25, "b": 0.75}


def test_a_process_weighs_its_noise_levels():
    class Weighted(RectifiedFlow):
        def loss_weight(self, sigma):
            return 10 * sigma

    clean, noise = torch.zeros(2, 1, 4), torch.ones(2, 1, 4)
    arguments = {"noise": noise, "positions": torch.tensor([0.2, 0.6]), "loss": LOSSES["MSE"]}
    predict_nothing = lambda noisy, t, conditions: torch.zeros_like(noisy)  # noqa: E731
    plain = sample_losses(RectifiedFlow(predict_nothing), clean, [None] * 2, **arguments)
    weighted = sample_losses(Weighted(predict_nothing), clean, [None] * 2, **arguments)
    torch.testing.assert_close(weighted, plain * torch.tensor([2.0, 6.0]))
