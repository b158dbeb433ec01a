"""What a LoRA training is asked to do, checked before anything runs."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import RequestError
from .adapters import ALGORITHMS
from .loss import LOSSES
from .number_ranges import Range, check_numbers
from .optimizer import OPTIMIZERS, check_installed
from .schedule import SCHEDULES
from .targets import BIASES, split_patterns

MOST_SEED = 2**64 - 1
"""Of PyTorch's generators."""

_LORA_NUMBERS = {"rank": Range(1, whole=True), "alpha": Range(0, without_ends=True)}
_TRAINING_NUMBERS = {
    "steps": Range(1, whole=True),
    "learning_rate": Range(0, without_ends=True),
    "batch_size": Range(1, whole=True),
    "accumulation_steps": Range(1, whole=True, name="grad_accumulation_steps"),
    "seed": Range(0, MOST_SEED, whole=True),
    "weight_decay": Range(0),
    "warmup_steps": Range(0, whole=True),
    "max_gradient_norm": Range(0, name="max_grad_norm"),
    "ema_decay": Range(0, 1),
}
_OFFLOAD_NUMBERS = {name: Range(0) for name in ("modulation_cache_mb", "vram_budget_gb", "ram_budget_gb")}
_THRESHOLD = {"split_threshold_mb": Range(0, without_ends=True)}


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
        check_numbers(self, _LORA_NUMBERS)
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
        check_numbers(self, _TRAINING_NUMBERS)
        _one_of("optimizer", self.optimizer, list(OPTIMIZERS))
        _one_of("loss_function", self.loss, list(LOSSES))
        _one_of("lr_schedule", self.schedule, list(SCHEDULES))
        if self.ema_decay == 1:
            raise RequestError(
                f"ema_decay={self.ema_decay} was asked",
                limit="At 1 the average would never take anything in",
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
        check_numbers(self, _OFFLOAD_NUMBERS)
        if self.split_threshold_mb is not None:
            check_numbers(self, _THRESHOLD)
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


def _one_of(name: str, value: str, known: list[str]) -> None:
    if value not in known:
        raise RequestError(
            f"{name}={value!r} was asked", limit=f"Known are {known}", way_out=f"Set {name} to one of them"
        )
