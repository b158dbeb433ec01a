"""Nodes that make a VAE decode, and a CLIP encode, on several GPUs."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..core.comfy_adapter import (
    RequestError,
    check_gpus,
    make_parallel_clip,
    make_parallel_vae,
    settings_version,
)
from .schema import known


def gpus_input() -> Any:
    """Return the input that both nodes have."""
    return io.Int.Input(
        "gpus",
        default=2,
        min=0,
        max=64,
        tooltip="How many GPUs compute, one worker process each. Best the same number as in Parallel Model "
        "or Parallel Sampler: then they use the same workers.",
    )


class OnSeveralGpus:
    """What both nodes do with that input."""

    @classmethod
    def validate_inputs(cls, gpus: int | None = None) -> bool | str:
        """Refuse a number of GPUs that the machine does not have before the prompt starts."""
        if gpus is None:  # not known yet
            return True
        try:
            check_gpus(gpus)
        except RequestError as error:
            return str(error)
        return True

    @classmethod
    def fingerprint_inputs(cls, **inputs: Any) -> str:
        """Run the node anew when other GPUs were chosen in the settings."""
        return settings_version("gpus")


class ParallelVae(OnSeveralGpus, io.ComfyNode):
    """Make a VAE decode on several GPUs, for any node that decodes."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Describe the node."""
        return io.Schema(
            node_id="FerryParallelVAE",
            display_name="Parallel VAE",
            category="ferry/parallel",
            description="Decodes each picture or video on several GPUs at once, without tiles and seams. Put "
            "it between the VAE and VAE Decode.",
            inputs=[io.Vae.Input("vae", tooltip="The VAE. Encoding stays on one GPU."), gpus_input()],
            outputs=[io.Vae.Output(display_name="vae", tooltip="The same VAE, decoding in parallel.")],
            **known(io.Schema, search_aliases=["multi gpu vae", "parallel vae decode", "distrifusion vae"]),
        )

    @classmethod
    def execute(cls, vae: Any, gpus: int) -> io.NodeOutput:
        """Return the parallel VAE."""
        return io.NodeOutput(make_parallel_vae(vae, gpus=gpus))


class ParallelTextEncoder(OnSeveralGpus, io.ComfyNode):
    """Share a CLIP's large text encoders among several GPUs."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Describe the node."""
        return io.Schema(
            node_id="FerryParallelTextEncoder",
            display_name="Parallel Text Encoder",
            category="ferry/parallel",
            description="Shares the weights of large text encoders (T5-XXL, Qwen2.5-VL, ...) among GPUs: "
            "each holds a part. Put it after LoRAs, before the text encode nodes.",
            inputs=[io.Clip.Input("clip", tooltip="The CLIP, with its LoRAs applied."), gpus_input()],
            outputs=[io.Clip.Output(display_name="clip", tooltip="The same CLIP, encoding in parallel.")],
            **known(io.Schema, search_aliases=["multi gpu clip", "tensor parallel t5"]),
        )

    @classmethod
    def execute(cls, clip: Any, gpus: int) -> io.NodeOutput:
        """Return the parallel CLIP."""
        return io.NodeOutput(make_parallel_clip(clip, gpus=gpus))
