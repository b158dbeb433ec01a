"""Samples, their pairing with conditions, their seeded order and the random numbers of a step.

Everything random is a function of the seed and of what it is for, never of torch's global
generator, so the same seed gives the same training and a training can be continued at any step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import RequestError

# Both ends of the noise schedule are left out: there sigma is 0 (nothing to learn from, and the loss
# divides by it) or the value that samplers use for "infinite".
_MARGIN = 1e-3


@dataclass(frozen=True)
class Sample:
    """One thing to learn.

    Attributes:
        latent: ``(1, C, ...)`` fp32 on the host.
        condition: What it shows, as the denoiser takes it.
    """

    latent: Tensor
    condition: Any


@dataclass(frozen=True)
class Batch:
    """Samples of one shape.

    Attributes:
        clean: ``(B, C, ...)`` fp32 on the host.
        noise: Standard normal, the same shape.
        positions: ``(B,)`` noise levels in (0, 1).
        conditions: ``B`` conditions.
    """

    clean: Tensor
    noise: Tensor
    positions: Tensor
    conditions: list[Any]


def pair_samples(latents: Sequence[Tensor], conditions: Sequence[Any]) -> list[Sample]:
    """Return each latent with its own condition; a single condition is shared by all.

    Args:
        latents: ``N`` tensors ``(1, C, ...)``.
        conditions: ``N`` conditions or one.

    Raises:
        RequestError: If a list is empty, the counts do not match, or a latent has NaN or infinities.
    """
    if not latents:
        raise RequestError("0 latents were given", limit="Training needs one", way_out="Connect a dataset")
    if not conditions:
        raise RequestError(
            f"{len(latents)} latents and 0 captions were given",
            limit="Each latent needs a caption, or one caption for all",
            way_out="Connect a text encode node to 'positive'",
        )
    if len(conditions) not in (1, len(latents)):
        raise RequestError(
            f"{len(latents)} latents and {len(conditions)} captions were given",
            limit="There must be one caption for each latent, or a single one for all",
            way_out=f"Give 1 or {len(latents)} captions",
        )
    for index, latent in enumerate(latents):
        _check_finite(index, latent)
    shared = list(conditions) * len(latents) if len(conditions) == 1 else conditions
    return [Sample(latent, condition) for latent, condition in zip(latents, shared, strict=True)]


def _check_finite(index: int, latent: Tensor) -> None:
    bad = int((~torch.isfinite(latent)).sum())
    if latent.numel() == 0 or bad:
        what = f"has {bad} NaN or infinite values" if bad else "is empty"
        raise RequestError(
            f"latent {index} of shape {tuple(latent.shape)} {what}",
            limit="Every latent must hold finite numbers",
            way_out="Check the node that made it (a VAE in half precision often does this)",
        )


def generator(seed: int, *purpose: str | int) -> torch.Generator:
    """Return a CPU generator for one purpose; different purposes give independent numbers."""
    text = "/".join(str(part) for part in (seed, *purpose))
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little"))


class SampleOrder:
    """Which samples each micro-step takes: epochs, each in its own seeded order.

    Args:
        num_samples: Samples of an epoch.
        batch_size: Samples of a micro-step; a batch may reach into the next epoch.
        seed: Of the orders.
    """

    def __init__(self, num_samples: int, *, batch_size: int, seed: int) -> None:
        self.num_samples = num_samples
        self.batch_size = batch_size
        self.seed = seed
        self._epoch: tuple[int, list[int]] = (-1, [])

    def indices(self, micro_step: int) -> list[int]:
        """Return the samples' indices of a micro-step, counted from 0."""
        first = micro_step * self.batch_size
        return [self._index(position) for position in range(first, first + self.batch_size)]

    def _index(self, position: int) -> int:
        epoch, offset = divmod(position, self.num_samples)
        if self._epoch[0] != epoch:
            order = torch.randperm(self.num_samples, generator=generator(self.seed, "order", epoch))
            self._epoch = (epoch, order.tolist())
        return self._epoch[1][offset]


def draw_batches(samples: Sequence[Sample], *, seed: int, micro_step: int) -> list[Batch]:
    """Return the samples of a micro-step with their noise, grouped by shape (several resolutions)."""
    random = generator(seed, "noise", micro_step)
    groups: dict[tuple[int, ...], list[tuple[Sample, Tensor, Tensor]]] = {}
    for sample in samples:
        noise = torch.randn(sample.latent.shape, generator=random)
        position = _MARGIN + (1 - 2 * _MARGIN) * torch.rand((1,), generator=random)
        groups.setdefault(tuple(sample.latent.shape), []).append((sample, noise, position))
    return [
        Batch(
            clean=torch.cat([sample.latent for sample, _, _ in group]),
            noise=torch.cat([noise for _, noise, _ in group]),
            positions=torch.cat([position for _, _, position in group]),
            conditions=[sample.condition for sample, _, _ in group],
        )
        for group in groups.values()
    ]
