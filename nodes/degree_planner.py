"""A node that proposes degrees."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io, ui

from ..core.comfy_adapter import plan_degrees
from .schema import known


class PlanParallelDegrees(io.ComfyNode):
    """Propose degrees for a model, a size and a number of GPUs."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Describe the node."""
        return io.Schema(
            node_id="FerryPlanParallelDegrees",
            display_name="Plan Parallel Degrees",
            category="ferry/parallel",
            description="Proposes gpus and degrees for Parallel Sampler or Parallel Model, and says why. "
            "Connect the outputs to the inputs of the same names.",
            inputs=[
                io.Model.Input("model", tooltip="The diffusion model, as the sampler will get it."),
                io.Conditioning.Input("positive", tooltip="What the picture should show."),
                io.Conditioning.Input("negative", tooltip="What the picture should not show."),
                io.Latent.Input("latent_image", tooltip="A latent of the size that will be sampled."),
                io.Float.Input(
                    "cfg",
                    default=4.0,
                    min=0.0,
                    max=100.0,
                    step=0.1,
                    round=0.01,
                    tooltip="Guidance scale. At 1.0 there is no negative prompt.",
                ),
                io.Int.Input(
                    "max_gpus",
                    default=2,
                    min=1,
                    max=64,
                    tooltip="The most GPUs to use; fewer where more gain nothing.",
                ),
            ],
            outputs=[
                io.Int.Output(display_name="gpus", tooltip="How many GPUs are worth using."),
                io.Int.Output(display_name="cfg_degree", tooltip="For the input of this name."),
                io.Int.Output(display_name="ulysses_degree", tooltip="For the input of this name."),
                io.Int.Output(display_name="ring_degree", tooltip="For the input of this name."),
                io.Int.Output(display_name="tensor_parallel_degree", tooltip="For the input of this name."),
                io.String.Output(display_name="why", tooltip="The reason, and predicted times."),
                # Last, so that saved workflows keep their links.
                io.Int.Output(display_name="batch_degree", tooltip="For the input of this name."),
            ],
            is_output_node=True,
            **known(io.Schema, search_aliases=["multi gpu planner", "auto parallel", "best degrees"]),
        )

    @classmethod
    def execute(cls, model: Any, latent_image: dict, max_gpus: int, **settings: Any) -> io.NodeOutput:
        """Return the degrees and the reason."""
        advice = plan_degrees(model, latent=latent_image, max_gpus=max_gpus, **settings)
        dims = advice.dims
        degrees = (dims.cfg, dims.ulysses, dims.ring, dims.tp)
        return io.NodeOutput(advice.gpus, *degrees, advice.text, dims.batch, ui=ui.PreviewText(advice.text))
