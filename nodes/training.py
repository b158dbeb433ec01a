"""Train a LoRA with the base model's weights streamed from host memory."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io, ui

from ..core.comfy_adapter import COMPUTE_DTYPES, SAVE_DTYPES, TrainingRequest, run_lora_training
from ..core.training import LOSSES, OPTIMIZERS
from .schema import known


def _basic_inputs() -> list[Any]:
    return [
        io.Model.Input("model", tooltip="The diffusion model to train on. LoRAs applied before are kept."),
        io.Latent.Input("latents", tooltip="What to learn: one batched latent, or a list from a dataset."),
        io.Conditioning.Input(
            "positive", tooltip="The captions: one for each latent in the same order, or one for all."
        ),
        io.Int.Input("steps", default=200, min=1, max=100000, tooltip="Optimizer steps."),
        io.Float.Input(
            "learning_rate",
            default=0.0002,
            min=0.0000001,
            max=1.0,
            step=0.0000001,
            tooltip="How far each step goes. Too high ruins the LoRA, too low learns nothing.",
        ),
        io.Int.Input(
            "rank", default=16, min=1, max=1024, tooltip="Size of the LoRA: more holds more detail."
        ),
        io.Float.Input(
            "alpha",
            default=16.0,
            min=0.001,
            max=4096.0,
            step=0.5,
            tooltip="Strength while training: the LoRA is scaled by alpha / rank. Usually the same as rank.",
        ),
        io.Int.Input(
            "seed",
            default=0,
            min=0,
            max=0xFFFFFFFFFFFFFFFF,
            control_after_generate=True,
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
    ]


def _advanced_inputs() -> list[Any]:
    def extra(kind: Any, name: str, **arguments: Any) -> Any:
        return kind.Input(name, **arguments, **known(kind.Input, advanced=True))

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
            options=list(LOSSES),
            default="MSE",
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
            tooltip="Parts of the model of at most this many MB move as one; 0: every layer on its own.",
        ),
        extra(
            io.String,
            "targets",
            default="",
            tooltip="Layers to train, as paths with * for one name, separated by commas; a leading - takes "
            "layers out. Empty: the attention and MLP layers of all blocks.",
        ),
    ]


class TrainLoraOffload(io.ComfyNode):
    """Train a LoRA while the base model's weights stay in host memory."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Describe the node; outputs fit ComfyUI's own SaveLoRA, LoraModelLoader and LossGraphNode."""
        return io.Schema(
            node_id="FerryTrainLoraOffload",
            display_name="Train LoRA (Offload)",
            category="ferry/training",
            description="Trains a LoRA on any diffusion model, also one that does not fit the GPU.",
            is_input_list=True,
            inputs=[*_basic_inputs(), *_advanced_inputs()],
            outputs=[
                io.Custom("LORA_MODEL").Output(display_name="lora", tooltip="The trained LoRA."),
                io.Custom("LOSS_MAP").Output(display_name="loss_map", tooltip="The loss of every step."),
                io.Int.Output(display_name="steps", tooltip="Steps done."),
            ],
            hidden=[io.Hidden.unique_id],
            **known(io.Schema, search_aliases=["train lora", "lora training", "layer offload", "block swap"]),
        )

    @classmethod
    def execute(
        cls, model: list, latents: list[dict], positive: list[list], **widgets: list
    ) -> io.NodeOutput:
        """Train and return the LoRA, its losses and the steps done."""
        request = TrainingRequest.from_widgets({name: value[0] for name, value in widgets.items()})
        node_id = cls.hidden.unique_id if cls.hidden else None
        result = run_lora_training(model[0], latents, positive, request, node_id=node_id)
        saved = f"saved {result.path.name}" if result.path else "not saved"
        text = ui.PreviewText(f"{result.steps} steps, loss {result.loss_map['loss'][-1]:.5f}, {saved}")
        return io.NodeOutput(result.lora, result.loss_map, result.steps, ui=text)
