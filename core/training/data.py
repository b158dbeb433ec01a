"""Samples, their pairing with conditions, their seeded order and the random numbers of a step.

Everything random is a function of the seed and of what it is for, never of torch's global
generator, so the same seed gives the same training and a training can be continued at any step.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

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
        unconditional: What stands in for the condition where the caption is dropped.
        dropout: How often that is, 0 to 1 (classifier-free guidance, arXiv:2207.12598).
    """

    latent: Tensor
    condition: Any
    unconditional: Any = None
    dropout: float = 0.0

    @property
    def shape(self) -> tuple[int, ...]:
        """The latent's shape."""
        return tuple(self.latent.shape)

    def read(self) -> Sample:
        """Return the sample itself: it is in memory already."""
        return self


class SampleSource(Protocol):
    """A sample that may have to be read first, for sets that are larger than the host's memory."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the latent, ``(1, C, ...)``, known without reading it."""
        ...

    def read(self) -> Sample:
        """Return the sample."""
        ...


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


def seed_torch(seed: int, device: torch.device) -> None:
    """Make what a model draws from torch's own generators (dropout) a function of the seed too."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.default_generators[index].manual_seed(seed)


class SampleOrder:
    """Which samples each micro-step takes: all of one bucket, each bucket in its own seeded epochs.

    Buckets take turns in a seeded order, in proportion to their sizes, and every batch is full: one
    that reaches the end of its bucket goes on in that bucket's next epoch. What a micro-step takes
    depends on its number alone, so a training can be continued at any of them.

    Args:
        buckets: What each sample can share a batch with (the latent's shape), one for each sample.
        batch_size: Samples of a micro-step.
        seed: Of the orders.
    """

    def __init__(self, buckets: Sequence[Hashable], *, batch_size: int, seed: int) -> None:
        self.batch_size = batch_size
        self.seed = seed
        members: dict[Hashable, list[int]] = {}
        for index, bucket in enumerate(buckets):
            members.setdefault(bucket, []).append(index)
        self._members = list(members.values())
        self._turns: tuple[int, list[int]] = (-1, [])
        self._permutations: dict[int, tuple[int, list[int]]] = {}

    def indices(self, micro_step: int) -> list[int]:
        """Return the samples' indices of a micro-step, counted from 0."""
        bucket, batch = self._batch(micro_step)
        first = batch * self.batch_size
        return [self._index(bucket, position) for position in range(first, first + self.batch_size)]

    def _batch(self, micro_step: int) -> tuple[int, int]:
        """Return the bucket whose turn it is, and how many batches it has given before."""
        # The last epoch that starts at or before this micro-step; `batch_size` epochs give a batch or more.
        epochs = range((micro_step + 1) * self.batch_size + 1)
        epoch = bisect.bisect_right(epochs, micro_step, key=self._batches_before) - 1
        offset = micro_step - self._batches_before(epoch)
        if self._turns[0] != epoch:
            self._turns = (epoch, self._shuffled_turns(epoch))
        turns = self._turns[1]
        bucket = turns[offset]
        return bucket, self._given(bucket, epoch) + turns[:offset].count(bucket)

    def _given(self, bucket: int, epoch: int) -> int:
        """Return how many full batches a bucket gives in all epochs before ``epoch``."""
        return epoch * len(self._members[bucket]) // self.batch_size

    def _batches_before(self, epoch: int) -> int:
        return sum(self._given(bucket, epoch) for bucket in range(len(self._members)))

    def _shuffled_turns(self, epoch: int) -> list[int]:
        turns = list(
            itertools.chain.from_iterable(
                [bucket] * (self._given(bucket, epoch + 1) - self._given(bucket, epoch))
                for bucket in range(len(self._members))
            )
        )
        order = torch.randperm(len(turns), generator=generator(self.seed, "buckets", epoch))
        return [turns[index] for index in order.tolist()]

    def _index(self, bucket: int, position: int) -> int:
        members = self._members[bucket]
        epoch, offset = divmod(position, len(members))
        if self._permutations.get(bucket, (-1, []))[0] != epoch:
            purpose = ("order", epoch, bucket) if bucket else ("order", epoch)
            order = torch.randperm(len(members), generator=generator(self.seed, *purpose))
            self._permutations[bucket] = (epoch, order.tolist())
        return members[self._permutations[bucket][1][offset]]


def draw_batches(samples: Sequence[SampleSource], *, seed: int, micro_step: int) -> list[Batch]:
    """Return the samples of a micro-step with their noise, grouped by shape.

    Captions are dropped here, each by its own draw, so that a sample is seen with and without its own.
    """
    random = generator(seed, "noise", micro_step)
    dropping = generator(seed, "caption dropout", micro_step)
    groups: dict[tuple[int, ...], list[tuple[Tensor, Any, Tensor, Tensor]]] = {}
    for source in samples:
        sample = source.read()
        noise = torch.randn(sample.latent.shape, generator=random)
        position = _MARGIN + (1 - 2 * _MARGIN) * torch.rand((1,), generator=random)
        dropped = float(torch.rand((), generator=dropping)) < sample.dropout
        condition = sample.unconditional if dropped else sample.condition
        groups.setdefault(sample.shape, []).append((sample.latent, condition, noise, position))
    return [
        Batch(
            clean=torch.cat([latent for latent, _, _, _ in group]),
            noise=torch.cat([noise for _, _, noise, _ in group]),
            positions=torch.cat([position for _, _, _, position in group]),
            conditions=[condition for _, condition, _, _ in group],
        )
        for group in groups.values()
    ]
