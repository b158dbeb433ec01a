"""What a LoRA training is asked to do, checked before anything runs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..errors import RequestError
from .loss import LOSSES
from .optimizer import OPTIMIZERS


@dataclass(frozen=True)
class LoraConfig:
    """Shape and placement of the adapters.

    Attributes:
        rank: Inner width ``r`` of ``up @ down``.
        alpha: The adapter's output is scaled by ``alpha / rank``; stored in the file, never trained.
        targets: Which layers get one; the syntax is that of ``targets.select_targets``.
    """

    rank: int = 16
    alpha: float = 16.0
    targets: str = ""

    def __post_init__(self) -> None:
        _at_least("rank", self.rank, 1)
        _positive("alpha", self.alpha)


@dataclass(frozen=True)
class TrainingConfig:
    """The loop's settings.

    Attributes:
        steps: Optimizer steps.
        learning_rate: Of the optimizer, constant.
        batch_size: Samples of one micro-step.
        accumulation_steps: Micro-steps whose gradients are averaged into one optimizer step.
        seed: Decides the adapters' start values, the order of samples, the noise and its levels.
        optimizer: A key of ``optimizer.OPTIMIZERS``.
        loss: A key of ``loss.LOSSES``.
    """

    steps: int
    learning_rate: float
    batch_size: int = 1
    accumulation_steps: int = 1
    seed: int = 0
    optimizer: str = "AdamW"
    loss: str = "MSE"

    def __post_init__(self) -> None:
        _at_least("steps", self.steps, 1)
        _at_least("batch_size", self.batch_size, 1)
        _at_least("grad_accumulation_steps", self.accumulation_steps, 1)
        _at_least("seed", self.seed, 0)
        _positive("learning_rate", self.learning_rate)
        _one_of("optimizer", self.optimizer, list(OPTIMIZERS))
        _one_of("loss_function", self.loss, list(LOSSES))


@dataclass(frozen=True)
class OffloadSettings:
    """How the base weights reach the training device.

    Attributes:
        enabled: Keep them in host memory and stream them layer by layer; False loads the whole model.
        optimizer_on_cpu: Keep the adapters and the optimizer's state in host memory as well.
        split_threshold_mb: Modules of at most this many MB (2**20 bytes) move as one; None moves
            single layers.
    """

    enabled: bool = True
    optimizer_on_cpu: bool = False
    split_threshold_mb: float | None = None

    def __post_init__(self) -> None:
        if self.split_threshold_mb is not None:
            _positive("split_threshold_mb", self.split_threshold_mb)
        if self.optimizer_on_cpu and not self.enabled:
            raise RequestError(
                "optimizer_on_cpu=True was asked with offload off",
                limit="The offload engine is what keeps the optimizer on the CPU",
                way_out="Switch offload on, or optimizer_on_cpu off",
            )


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise RequestError(
            f"{name}={value} was asked", limit=f"It must be at least {least}", way_out=f"Raise {name}"
        )


def _positive(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise RequestError(
            f"{name}={value} was asked",
            limit="It must be a finite number above 0",
            way_out=f"Set {name} to a positive number",
        )


def _one_of(name: str, value: str, known: list[str]) -> None:
    if value not in known:
        raise RequestError(
            f"{name}={value!r} was asked", limit=f"Known are {known}", way_out=f"Set {name} to one of them"
        )
