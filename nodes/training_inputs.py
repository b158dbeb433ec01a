"""The inputs of the training node."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..core.comfy_adapter import (
    AUTO,
    COMPUTE_DTYPES,
    SAVE_DTYPES,
    resume_choices,
)
from ..core.training import ALGORITHMS, LOSSES, OPTIMIZERS, SCHEDULES
from .schema import advanced


def basic_inputs() -> list[Any]:
    """Return what everybody sets."""
    return [
        io.Model.Input("model", tooltip="The diffusion model to train on. LoRAs applied before are kept."),
        io.Latent.Input(
            "latents",
            optional=True,
            tooltip="What to learn: one batched latent, or a list from a dataset. Not with training_data.",
        ),
        io.Conditioning.Input(
            "positive",
            optional=True,
            tooltip="The captions: one for each latent in the same order, or one for all. Not with "
            "training_data.",
        ),
        io.Int.Input("steps", default=200, min=1, max=100000, tooltip="Optimizer steps."),
        io.Float.Input(
            "learning_rate",
            default=0.0,
            min=0.0,
            max=1.0,
            step=0.0000001,
            tooltip="How far each step goes: too high ruins the LoRA, too low learns nothing. 0: what suits "
            "the model's family.",
        ),
        io.Int.Input(
            "rank",
            default=0,
            min=0,
            max=1024,
            tooltip="Size of the LoRA: more holds more detail. 0: what suits the model's family.",
        ),
        io.Float.Input(
            "alpha",
            default=0.0,
            min=0.0,
            max=4096.0,
            step=0.5,
            tooltip="Strength while training: the LoRA is scaled by alpha / rank. 0: what suits the model's "
            "family, mostly the same as rank.",
        ),
        io.Int.Input(
            "seed",
            default=0,
            min=0,
            max=0xFFFFFFFFFFFFFFFF,
            tooltip="Decides the LoRA's start, the order of the latents, and the noise.",
        ),
        io.Boolean.Input(
            "offload",
            default=True,
            tooltip="Keep the model in host memory and bring each layer to the GPU when it is needed.",
        ),
        io.String.Input(
            "save_prefix",
            default="loras/ferry_lora",
            tooltip="Where to save in the output folder; checked by loading it back. Empty: not saved here.",
        ),
        io.Combo.Input(
            "resume_from",
            options=resume_choices(),
            default="none",
            tooltip="Go on with a training that ended, was cancelled or failed, bit for bit; 'latest' is the "
            "newest of this save_prefix. 'steps' counts the steps done before too.",
        ),
    ]


def advanced_inputs() -> list[Any]:
    """Return what has a good default."""

    def extra(kind: Any, name: str, **arguments: Any) -> Any:
        return advanced(kind.Input(name, **arguments))

    return [
        extra(io.Int, "batch_size", default=1, min=1, max=1024, tooltip="Latents per forward pass."),
        extra(
            io.Int,
            "grad_accumulation_steps",
            default=1,
            min=1,
            max=1024,
            tooltip="Forward passes per optimizer step.",
        ),
        extra(io.Combo, "optimizer", options=list(OPTIMIZERS), default="AdamW", tooltip="The optimizer."),
        extra(
            io.Combo,
            "loss_function",
            options=[AUTO, *LOSSES],
            default=AUTO,
            tooltip="How the error of the model's output (velocity, noise) is measured.",
        ),
        extra(
            io.Combo,
            "training_dtype",
            options=list(COMPUTE_DTYPES),
            default="auto",
            tooltip="What the model computes in. auto: as it samples, but bf16 instead of fp16.",
        ),
        extra(
            io.Combo,
            "lora_dtype",
            options=list(SAVE_DTYPES),
            default="bf16",
            tooltip="What the LoRA is saved in. It is trained in fp32 in any case.",
        ),
        extra(
            io.Boolean,
            "gradient_checkpointing",
            default=True,
            tooltip="Compute each block again in the backward pass: much less memory, a third more time.",
        ),
        extra(
            io.Boolean,
            "optimizer_on_cpu",
            default=False,
            tooltip="Keep the LoRA and the optimizer's state in host memory too. Needs offload.",
        ),
        extra(
            io.Float,
            "split_threshold_mb",
            default=0.0,
            min=0.0,
            max=1048576.0,
            step=1.0,
            tooltip="Parts of the model of at most this many MB move as one. 0: whole blocks on a GPU, "
            "recorded as CUDA graphs; single layers elsewhere.",
        ),
        extra(
            io.Combo,
            "algorithm",
            options=list(ALGORITHMS),
            default="LoRA",
            tooltip="What is trained on each layer. DoRA also learns the length of the weight's columns; "
            "LoKr and LoHa make small files of high rank.",
        ),
        *_optimizer_inputs(extra),
        *_preview_settings(extra),
        extra(
            io.Int,
            "save_every",
            default=0,
            min=0,
            max=100000,
            tooltip="Save the training's state every so many steps. 0: when it ends, is cancelled or fails.",
        ),
        extra(
            io.Int,
            "keep_states",
            default=2,
            min=0,
            max=1000,
            tooltip="How many states of this training to keep in output/training_states; 0: none is written.",
        ),
        extra(
            io.String,
            "targets",
            default="",
            tooltip="Layers to train, as paths with * for one name, separated by commas; a leading - takes "
            "layers out. Empty: the attention and MLP layers of all blocks, or what suits the family. "
            "+biases and +norms train their biases, and the blocks' norms, too.",
        ),
    ]


def _optimizer_inputs(extra: Any) -> list[Any]:
    return [
        extra(
            io.Combo,
            "lr_schedule",
            options=list(SCHEDULES),
            default="constant",
            tooltip="How the learning rate goes after the warm-up: cosine and linear fall to 0.",
        ),
        extra(
            io.Int,
            "warmup_steps",
            default=0,
            min=0,
            max=100000,
            tooltip="Over so many steps the learning rate rises from 0.",
        ),
        extra(
            io.Float,
            "weight_decay",
            default=0.01,
            min=0.0,
            max=10.0,
            step=0.001,
            tooltip="Pulls the LoRA towards zero, as the optimizer defines it.",
        ),
        extra(
            io.Float,
            "max_grad_norm",
            default=0.0,
            min=0.0,
            max=1000.0,
            step=0.1,
            tooltip="Gradients with a larger norm are scaled down to it; 0: never. 1 tames outliers.",
        ),
        extra(
            io.Float,
            "ema_decay",
            default=0.0,
            min=0.0,
            max=0.9999,
            step=0.001,
            tooltip="Return an average of the last steps, 0.99 for about a hundred; 0: the last step itself.",
        ),
    ]


def _preview_settings(extra: Any) -> list[Any]:
    return [
        extra(
            io.Int,
            "preview_every",
            default=0,
            min=0,
            max=100000,
            tooltip="Sample a picture with the LoRA so far every so many steps; 0: only when asked for.",
        ),
        extra(io.Int, "preview_steps", default=12, min=1, max=1000, tooltip="Sampler steps of a preview."),
        extra(
            io.Float,
            "preview_cfg",
            default=1.0,
            min=1.0,
            max=100.0,
            step=0.1,
            tooltip="CFG of a preview. More than 1 needs preview_negative.",
        ),
    ]


# In the order of PreviewInputs.
PREVIEW_INPUTS = ("preview_vae", "preview_positive", "preview_negative")


def preview_inputs() -> list[Any]:
    """Return what may be connected for previews."""
    tooltips = (
        "Decodes the previews; without it they are rough colours of the latent.",
        "What the previews show; without it the first caption of the data.",
        "The negative prompt of the previews.",
    )
    kinds = (io.Vae, io.Conditioning, io.Conditioning)
    return [
        kind.Input(name, optional=True, tooltip=tooltip)
        for kind, name, tooltip in zip(kinds, PREVIEW_INPUTS, tooltips, strict=True)
    ]
