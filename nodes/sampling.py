"""KSampler on several GPUs."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..core.comfy_adapter import sample_parallel, sampler_names, scheduler_names
from .parallel import degree_inputs, degree_problem
from .schema import known


class ParallelSampler(io.ComfyNode):
    """KSampler whose denoiser calls run on several GPUs."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Describe the node: KSampler's inputs, then the degrees."""
        return io.Schema(
            node_id="FerryParallelSampler",
            display_name="Parallel Sampler",
            category="ferry/parallel",
            description="KSampler on several GPUs: same inputs, same picture, computed in parallel.",
            inputs=[
                io.Model.Input("model", tooltip="The diffusion model, with its LoRAs applied."),
                io.Int.Input(
                    "seed",
                    default=0,
                    min=0,
                    max=0xFFFFFFFFFFFFFFFF,
                    control_after_generate=True,
                    tooltip="The random seed used for creating the noise.",
                ),
                io.Int.Input("steps", default=20, min=1, max=10000, tooltip="Denoising steps."),
                io.Float.Input(
                    "cfg",
                    default=4.0,
                    min=0.0,
                    max=100.0,
                    step=0.1,
                    round=0.01,
                    tooltip="Guidance scale. At 1.0 there is no negative prompt: cfg_degree 2 gains nothing.",
                ),
                io.Combo.Input(
                    "sampler_name", options=sampler_names(), default="euler", tooltip="The sampler."
                ),
                io.Combo.Input(
                    "scheduler", options=scheduler_names(), default="simple", tooltip="The noise schedule."
                ),
                io.Conditioning.Input("positive", tooltip="What the picture should show."),
                io.Conditioning.Input("negative", tooltip="What the picture should not show."),
                io.Latent.Input("latent_image", tooltip="The latent to denoise."),
                io.Float.Input(
                    "denoise",
                    default=1.0,
                    min=0.0,
                    max=1.0,
                    step=0.01,
                    tooltip="How much of the latent is denoised; below 1.0 keeps its structure.",
                ),
                *degree_inputs(),
            ],
            outputs=[io.Latent.Output(display_name="latent", tooltip="The denoised latent.")],
            **known(io.Schema, search_aliases=["multi gpu ksampler", "ulysses", "cfg parallel", "xdit"]),
        )

    @classmethod
    def validate_inputs(
        cls,
        gpus: int | None = None,
        cfg_degree: int | None = None,
        ulysses_degree: int | None = None,
        ring_degree: int | None = None,
        tensor_parallel_degree: int | None = None,
        batch_degree: int | None = None,
        ray_address: str | None = "",
        acceleration: str | None = None,
    ) -> bool | str:
        """Refuse degrees that do not fit before the prompt starts."""
        return degree_problem(
            gpus,
            cfg_degree,
            ulysses_degree,
            ring_degree,
            tensor_parallel_degree,
            batch_degree,
            ray_address,
            acceleration,
        )

    @classmethod
    def execute(cls, model: Any, latent_image: dict, **settings: Any) -> io.NodeOutput:
        """Return the sampled LATENT."""
        return io.NodeOutput(sample_parallel(model, latent=latent_image, **settings))
