"""Train a LoRA with the base model's weights streamed from host memory."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io, ui

from ..core.comfy_adapter import (
    PreviewInputs,
    TrainingRequest,
    fill_auto,
    resume_version,
    run_lora_training,
)
from .schema import known
from .training_family_inputs import family_inputs
from .training_inputs import PREVIEW_INPUTS, advanced_inputs, basic_inputs, preview_inputs


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, list) and value else value


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
            inputs=[*basic_inputs(), *advanced_inputs(), *preview_inputs(), *family_inputs()],
            outputs=[
                io.Custom("LORA_MODEL").Output(display_name="lora", tooltip="The trained LoRA."),
                io.Custom("LOSS_MAP").Output(display_name="loss_map", tooltip="The loss of every step."),
                io.Int.Output(display_name="steps", tooltip="Steps done."),
            ],
            hidden=[io.Hidden.unique_id],
            **known(io.Schema, search_aliases=["train lora", "lora training", "layer offload", "block swap"]),
        )

    @classmethod
    def fingerprint_inputs(cls, **inputs: Any) -> str:
        """Train again when the state to go on from has changed."""
        chosen = [_first(inputs.get(name)) for name in ("resume_from", "save_prefix")]
        return resume_version(*chosen) if all(isinstance(value, str) for value in chosen) else "linked"

    @classmethod
    def execute(
        cls,
        model: list,
        latents: list[dict] | None = None,
        positive: list[list] | None = None,
        training_data: list | None = None,
        **widgets: list,
    ) -> io.NodeOutput:
        """Train and return the LoRA, its losses and the steps done."""
        connected = {name: (widgets.pop(name, None) or [None])[0] for name in PREVIEW_INPUTS}
        filled = fill_auto(model[0], {name: value[0] for name, value in widgets.items()})
        request = TrainingRequest.from_widgets(filled.values, plan=filled.plan)
        node_id = cls.hidden.unique_id if cls.hidden else None
        result = run_lora_training(
            model[0],
            latents or [],
            positive or [],
            request,
            data=training_data[0] if training_data else None,
            node_id=node_id,
            preview=PreviewInputs(*connected.values()),
        )
        saved = f"saved {result.path.name}" if result.path else "not saved"
        text = ui.PreviewText(
            f"{result.steps} steps, loss {result.loss_map['loss'][-1]:.5f}, {saved}\n{filled.plan}"
        )
        return io.NodeOutput(result.lora, result.loss_map, result.steps, ui=text)
