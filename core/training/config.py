"""What a LoRA training is asked to do, checked before anything runs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..errors import RequestError
from .adapters import ALGORITHMS
from .loss import LOSSES
from .optimizer import OPTIMIZERS, check_installed
from .schedule import SCHEDULES
from .targets import BIASES, split_patterns


@dataclass(frozen=True)
class LoraConfig:
    """Shape and placement of the adapters.

    Attributes:
        rank: Inner width ``r`` of their matrices.
        alpha: The adapter's output is scaled by ``alpha / rank``; stored in the file, never trained.
        targets: Which layers get one; the syntax is that of ``targets.select_targets``. With ``+biases``
            in it, the biases of these layers are trained too.
        algorithm: A key of ``adapters.ALGORITHMS``.
    """

    rank: int = 16
    alpha: float = 16.0
    targets: str = ""
    algorithm: str = "LoRA"

    def __post_init__(self) -> None:
        _at_least("rank", self.rank, 1)
        _positive("alpha", self.alpha)
        _one_of("algorithm", self.algorithm, list(ALGORITHMS))

    @property
    def trains_biases(self) -> bool:
        """Whether the targets' biases are trained too."""
        return BIASES in split_patterns(self.targets)[1]


@dataclass(frozen=True)
class TrainingConfig:
    """The loop's settings.

    Attributes:
        steps: Optimizer steps.
        learning_rate: Of the optimizer, at the height of its schedule.
        batch_size: Samples of one micro-step.
        accumulation_steps: Micro-steps whose gradients are averaged into one optimizer step.
        seed: Decides the adapters' start values, the order of samples, the noise and its levels.
        optimizer: A key of ``optimizer.OPTIMIZERS``.
        loss: A key of ``loss.LOSSES``.
        weight_decay: Of the optimizer.
        schedule: One of ``schedule.SCHEDULES``.
        warmup_steps: Over so many steps the learning rate rises to its height.
        max_gradient_norm: Gradients whose norm, all together, is larger are scaled down to it; 0: never.
        ema_decay: Of the moving average of the weights, which is then what is returned; 0: none.
    """

    steps: int
    learning_rate: float
    batch_size: int = 1
    accumulation_steps: int = 1
    seed: int = 0
    optimizer: str = "AdamW"
    loss: str = "MSE"
    weight_decay: float = 0.01
    schedule: str = "constant"
    warmup_steps: int = 0
    max_gradient_norm: float = 0.0
    ema_decay: float = 0.0

    def __post_init__(self) -> None:
        _at_least("steps", self.steps, 1)
        _at_least("batch_size", self.batch_size, 1)
        _at_least("grad_accumulation_steps", self.accumulation_steps, 1)
        _at_least("seed", self.seed, 0)
        _positive("learning_rate", self.learning_rate)
        _one_of("optimizer", self.optimizer, list(OPTIMIZERS))
        _one_of("loss_function", self.loss, list(LOSSES))
        _one_of("lr_schedule", self.schedule, list(SCHEDULES))
        _at_least("warmup_steps", self.warmup_steps, 0)
        _not_negative("weight_decay", self.weight_decay)
        _not_negative("max_grad_norm", self.max_gradient_norm)
        _not_negative("ema_decay", self.ema_decay)
        if self.ema_decay >= 1:
            raise RequestError(
                f"ema_decay={self.ema_decay} was asked",
                limit="At 1 or more the average would never take anything in",
                way_out="Use a value such as 0.99, or 0 for none",
            )
        if self.warmup_steps >= self.steps:
            raise RequestError(
                f"warmup_steps={self.warmup_steps} was asked for {self.steps} steps",
                limit="The warm-up has to end before the training does",
                way_out="Lower warmup_steps, or raise steps",
            )
        self._check_averaging()
        check_installed(self.optimizer)

    def _check_averaging(self) -> None:
        if not OPTIMIZERS[self.optimizer].averages_weights:
            return
        asked = {"lr_schedule": self.schedule, "ema_decay": self.ema_decay}
        unwanted = {name: value for name, value in asked.items() if value not in ("constant", 0)}
        if unwanted:
            raise RequestError(
                f"{unwanted} was asked with optimizer={self.optimizer!r}",
                limit="It averages the weights itself, which takes the place of a falling rate and of EMA",
                way_out="Set lr_schedule to constant and ema_decay to 0, or choose another optimizer",
            )


@dataclass(frozen=True)
class OffloadSettings:
    """How the base weights reach the training device.

    Attributes:
        enabled: Keep them in host memory and stream them layer by layer; False loads the whole model.
        optimizer_on_cpu: Keep the adapters and the optimizer's state in host memory as well.
        split_threshold_mb: Modules of at most this many MB (2**20 bytes) move as one; None moves
            single layers.
        modulation_cache_mb: Device memory, in MB (2**20 bytes), for outputs of frozen modulation layers,
            which are computed for several steps at once instead of being streamed; 0 streams them.
        vram_budget_gb: Device memory for the whole training, in GB (10**9 bytes); weights for which it has
            room stay there. 0: what is free (on the CPU: all are streamed).
        ram_budget_gb: Host memory for the weights, in GB; 0: no limit.
        record_blocks: On a CUDA device, replay checkpointed blocks as CUDA graphs where they can be. A block
            then moves as a whole, unless ``split_threshold_mb`` says otherwise.
        inputs_on_host: On a CUDA device, what checkpointed blocks keep for the backward waits on the host.
    """

    enabled: bool = True
    optimizer_on_cpu: bool = False
    split_threshold_mb: float | None = None
    modulation_cache_mb: float = 128.0
    vram_budget_gb: float = 0.0
    ram_budget_gb: float = 0.0
    record_blocks: bool = True
    inputs_on_host: bool = True

    def __post_init__(self) -> None:
        if self.split_threshold_mb is not None:
            _positive("split_threshold_mb", self.split_threshold_mb)
        for name in ("modulation_cache_mb", "vram_budget_gb", "ram_budget_gb"):
            _not_negative(name, getattr(self, name))
        if self.optimizer_on_cpu and not self.enabled:
            raise RequestError(
                "optimizer_on_cpu=True was asked with offload off",
                limit="The offload engine is what keeps the optimizer on the CPU",
                way_out="Switch offload on, or optimizer_on_cpu off",
            )
        if (self.vram_budget_gb or self.ram_budget_gb) and not self.enabled:
            raise RequestError(
                f"vram_budget_gb={self.vram_budget_gb}, ram_budget_gb={self.ram_budget_gb} was asked with "
                "offload off",
                limit="Without offload the whole model is on the GPU",
                way_out="Switch offload on, or set both budgets to 0",
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


def _not_negative(name: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise RequestError(
            f"{name}={value} was asked",
            limit="It must be a finite number, 0 or above",
            way_out=f"Set {name} to 0 or a positive number",
        )


def _one_of(name: str, value: str, known: list[str]) -> None:
    if value not in known:
        raise RequestError(
            f"{name}={value!r} was asked", limit=f"Known are {known}", way_out=f"Set {name} to one of them"
        )
