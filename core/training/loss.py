"""The training loss of a diffusion model, in the space of the network's own output.

A denoiser predicts the clean sample ``x0`` from a noisy one; that prediction is affine in the
network's output: ``x0_hat = a(sigma) * noisy + b(sigma) * output``. The error of the output is
therefore ``(x0_hat - x0) / b(sigma)``, and its mean square is the loss that each family was
trained with:

- rectified flow (``b = -sigma``): the velocity loss (Flow Matching, arXiv:2210.02747; SD3, arXiv:2403.03206);
- epsilon prediction (``b = -sigma``): the noise loss (DDPM, arXiv:2006.11239);
- v prediction: the v loss (arXiv:2202.00512);
- EDM: the loss of the raw network with its preconditioning (arXiv:2206.00364).

Shapes: ``B`` samples of a batch; ``C, ...`` channels and any spatial or temporal dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

Loss = Callable[[Tensor, Tensor], Tensor]


def _mse(prediction: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(prediction, target, reduction="none")


def _l1(prediction: Tensor, target: Tensor) -> Tensor:
    return F.l1_loss(prediction, target, reduction="none")


def _huber(prediction: Tensor, target: Tensor) -> Tensor:
    return F.huber_loss(prediction, target, reduction="none")


def _smooth_l1(prediction: Tensor, target: Tensor) -> Tensor:
    return F.smooth_l1_loss(prediction, target, reduction="none")


LOSSES: dict[str, Loss] = {"MSE": _mse, "L1": _l1, "Huber": _huber, "SmoothL1": _smooth_l1}


class DiffusionProcess(Protocol):
    """A denoiser together with the noise process that it was trained for."""

    def sigmas(self, positions: Tensor) -> Tensor:
        """Return the noise levels at ``positions``.

        Args:
            positions: ``(B,)`` uniform in (0, 1): quantiles of the noise levels, 0 clean, 1 pure noise.

        Returns:
            ``(B,)`` sigmas, fp32, on the training device.
        """
        ...

    def add_noise(self, clean: Tensor, noise: Tensor, sigma: Tensor) -> Tensor:
        """Return the noisy samples ``(B, C, ...)`` of level ``sigma`` ``(B,)``."""
        ...

    def denoise(self, noisy: Tensor, sigma: Tensor, conditions: Sequence[Any]) -> Tensor:
        """Return the predicted clean samples ``(B, C, ...)``, fp32; ``conditions`` has one per sample."""
        ...

    def output_scale(self, sigma: Tensor) -> Tensor:
        """Return ``b(sigma)``, ``(B,)``: the derivative of the clean prediction by the output."""
        ...

    def loss_weight(self, sigma: Tensor) -> Tensor:
        """Return how much the loss at ``sigma`` counts, ``(B,)``; 1 is as it is."""
        ...


def sample_losses(
    process: DiffusionProcess,
    clean: Tensor,
    conditions: Sequence[Any],
    *,
    noise: Tensor,
    positions: Tensor,
    loss: Loss,
) -> Tensor:
    """Return one loss per sample, ``(B,)``, fp32, with its graph.

    Args:
        process: The denoiser.
        clean: ``(B, C, ...)`` fp32 clean samples on the training device.
        conditions: What each sample shows; sample ``i`` is only ever paired with condition ``i``.
        noise: Standard normal, shaped like ``clean``.
        positions: ``(B,)`` in (0, 1), see ``DiffusionProcess.sigmas``.
        loss: An elementwise loss of ``LOSSES``.
    """
    sigma = process.sigmas(positions)
    noisy = process.add_noise(clean, noise, sigma)
    predicted = process.denoise(noisy, sigma, conditions)
    scale = process.output_scale(sigma).view(-1, *(1,) * (clean.ndim - 1))
    error = (predicted.float() - clean) / scale
    losses = loss(error, torch.zeros_like(error)).flatten(1).mean(dim=1)
    return losses * process.loss_weight(sigma)


class RectifiedFlow:
    """A plain velocity network as a ``DiffusionProcess``: ``x_t = (1 - t) x0 + t noise``.

    Args:
        velocity: ``velocity(noisy, t, conditions) -> (B, C, ...)``, the predicted ``noise - x0``.
        device: Where it computes.
    """

    def __init__(
        self,
        velocity: Callable[[Tensor, Tensor, Sequence[Any]], Tensor],
        device: torch.device | str = "cpu",
    ) -> None:
        self.velocity = velocity
        self.device = torch.device(device)

    def sigmas(self, positions: Tensor) -> Tensor:
        """Return the positions themselves: time is the noise level."""
        return positions.to(self.device)

    def add_noise(self, clean: Tensor, noise: Tensor, sigma: Tensor) -> Tensor:
        """Return the point on the straight line from ``clean`` to ``noise``."""
        t = sigma.view(-1, *(1,) * (clean.ndim - 1))
        return (1 - t) * clean + t * noise

    def denoise(self, noisy: Tensor, sigma: Tensor, conditions: Sequence[Any]) -> Tensor:
        """Return the clean end of the line."""
        t = sigma.view(-1, *(1,) * (noisy.ndim - 1))
        return noisy - t * self.velocity(noisy, sigma, conditions)

    def output_scale(self, sigma: Tensor) -> Tensor:
        """Return ``-t``."""
        return -sigma

    def loss_weight(self, sigma: Tensor) -> Tensor:
        """Return ones: every noise level counts alike."""
        return torch.ones_like(sigma)
