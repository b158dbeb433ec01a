"""What a person asked the training node for, apart from the model and the data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import RequestError
from ..training import LoraConfig, NoiseLevels, OffloadSettings, Range, TrainingConfig, check_numbers
from .family_defaults import AUTO_GUIDANCE
from .training_inputs import Guidance

COMPUTE_DTYPES = ("auto", "bf16", "fp32")
SAVE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
NO_RESUME, RESUME_LATEST = "none", "latest"
_SAVE_NUMBERS = {"every": Range(0, whole=True, name="save_every"), "keep_states": Range(0, whole=True)}
_PREVIEW_NUMBERS = {
    "every": Range(0, whole=True, name="preview_every"),
    "steps": Range(1, whole=True, name="preview_steps"),
    "cfg": Range(1, name="preview_cfg"),
}


@dataclass(frozen=True)
class SaveSettings:
    """What is written to ComfyUI's output folder, and when.

    Attributes:
        prefix: File prefix of the LoRA; empty saves nothing at all.
        every: Write the training's state every so many steps; 0: only when it ends, by itself, by a
            stop, by a cancel or by an error.
        keep_states: How many states of this run to keep; 0 writes none.
        resume_from: ``"none"``, ``"latest"`` (of this prefix) or the name of a state.
    """

    prefix: str = ""
    every: int = 0
    keep_states: int = 2
    resume_from: str = NO_RESUME

    def __post_init__(self) -> None:
        check_numbers(self, _SAVE_NUMBERS)
        if self.every and not (self.prefix and self.keep_states):
            raise RequestError(
                f"save_every={self.every} was asked with save_prefix={self.prefix!r} and "
                f"keep_states={self.keep_states}",
                limit="States are written beside the LoRA, and at least one has to be kept",
                way_out="Set save_prefix and keep_states, or save_every to 0",
            )
        if self.resume_from == RESUME_LATEST and not self.prefix:
            raise RequestError(
                "resume_from='latest' was asked without a save_prefix",
                limit="The latest state is looked for under the prefix",
                way_out="Set save_prefix to that of the training to go on with, or choose a state by name",
            )


@dataclass(frozen=True)
class PreviewSettings:
    """Pictures during the training.

    Attributes:
        every: One every so many steps; 0: only when asked for.
        steps: Of the sampler.
        cfg: Of the sampler; 1 evaluates the positive prompt alone.
    """

    every: int = 0
    steps: int = 12
    cfg: float = 1.0

    def __post_init__(self) -> None:
        check_numbers(self, _PREVIEW_NUMBERS)


@dataclass(frozen=True)
class TrainingRequest:
    """Everything about a training but the model and the data.

    Attributes:
        lora: Rank, alpha, targets.
        training: The loop's settings.
        offload: How the base weights reach the training device.
        saves: Files to write and to go on from.
        previews: Pictures to make meanwhile.
        compute_dtype: One of ``COMPUTE_DTYPES``, see ``training_dtype``.
        save_dtype: One of ``SAVE_DTYPES``, of the returned and saved tensors; the masters are fp32.
        gradient_checkpointing: Compute each block again in the backward pass.
        levels: Which noise levels are trained how often.
        guidance: For networks that embed a guidance scale; None leaves the captions as they are.
        plan: One line for the person, shown before the first step.
        gpus: How many GPUs share the micro-steps of each step.
    """

    lora: LoraConfig
    training: TrainingConfig
    offload: OffloadSettings
    saves: SaveSettings = SaveSettings()
    previews: PreviewSettings = PreviewSettings()
    compute_dtype: str = "auto"
    save_dtype: str = "bf16"
    gradient_checkpointing: bool = True
    levels: NoiseLevels = field(default_factory=NoiseLevels)
    guidance: Guidance | None = None
    plan: str = ""
    gpus: int = 1

    def __post_init__(self) -> None:
        check_numbers(self, {"gpus": Range(1, whole=True)})
        for name, value, known in (
            ("training_dtype", self.compute_dtype, COMPUTE_DTYPES),
            ("lora_dtype", self.save_dtype, tuple(SAVE_DTYPES)),
        ):
            if value not in known:
                raise RequestError(
                    f"{name}={value!r} was asked",
                    limit=f"Known are {list(known)}",
                    way_out=f"Set {name} to one of them",
                )

    @classmethod
    def from_widgets(cls, widgets: dict[str, Any], *, plan: str = "") -> TrainingRequest:
        """Return the request of a node, whose widgets are flat and hold no ``auto`` (see ``fill_auto``).

        Raises:
            RequestError: If a value is out of its range.
        """
        threshold_mb = widgets["split_threshold_mb"]
        return cls(
            lora=LoraConfig(widgets["rank"], widgets["alpha"], widgets["targets"], widgets["algorithm"]),
            training=TrainingConfig(
                steps=widgets["steps"],
                learning_rate=widgets["learning_rate"],
                batch_size=widgets["batch_size"],
                accumulation_steps=widgets["grad_accumulation_steps"],
                seed=widgets["seed"],
                optimizer=widgets["optimizer"],
                loss=widgets["loss_function"],
                weight_decay=widgets["weight_decay"],
                schedule=widgets["lr_schedule"],
                warmup_steps=widgets["warmup_steps"],
                max_gradient_norm=widgets["max_grad_norm"],
                ema_decay=widgets["ema_decay"],
            ),
            offload=OffloadSettings(
                enabled=widgets["offload"],
                optimizer_on_cpu=widgets["optimizer_on_cpu"],
                split_threshold_mb=threshold_mb if threshold_mb else None,
                vram_budget_gb=widgets["vram_budget_gb"],
                ram_budget_gb=widgets["ram_budget_gb"],
            ),
            saves=SaveSettings(
                prefix=widgets["save_prefix"].strip(),
                every=widgets["save_every"],
                keep_states=widgets["keep_states"],
                resume_from=widgets["resume_from"],
            ),
            previews=PreviewSettings(
                widgets["preview_every"], widgets["preview_steps"], widgets["preview_cfg"]
            ),
            compute_dtype=widgets["training_dtype"],
            save_dtype=widgets["lora_dtype"],
            gradient_checkpointing=widgets["gradient_checkpointing"],
            levels=NoiseLevels(
                sampling=widgets["timestep_sampling"],
                shift=widgets["timestep_shift"] or None,
                lowest=widgets["lowest_noise"],
                highest=widgets["highest_noise"],
                weighting=widgets["loss_weighting"],
            ),
            guidance=None
            if widgets["guidance"] == AUTO_GUIDANCE
            else Guidance(widgets["guidance"], replaces=not widgets["guidance_is_default"]),
            plan=plan,
            gpus=widgets["gpus"],
        )
