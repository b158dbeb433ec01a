"""Plan of ComfyUI's ``NextDiT`` class.

Runs Z-Image, Z-Image-Turbo and Lumina 2. Two regions: the noise refiner over the image tokens, then the
layers over text and image as one stream, which the model has joined (and padded) before. The text and
reference refiners are small and run whole on every rank. Reference latents are image tokens.
"""

from __future__ import annotations

from ..parallel.plan import (
    Absent,
    Gather,
    InputAction,
    Local,
    LocalRanges,
    ModelPlan,
    ModuleRule,
    ParallelMethod,
    Replicated,
    SelfAttention,
    Shard,
    Split,
)


def _block_inputs(stream: str) -> tuple[InputAction, ...]:
    return (
        Local("x", (stream,)),
        Shard("freqs_cis", (stream,)),
        # Which tokens are modulated as timestep 0 (references). Newer class only.
        LocalRanges("timestep_zero_index", stream, optional=True),
        # Both regions are without one; the model pads by learned tokens, which are attended to.
        Absent("x_mask"),
        Replicated("adaln_input"),
        Replicated("transformer_options"),
    )


PLAN = ModelPlan(
    name="Z-Image",
    class_path="comfy.ldm.lumina.model.NextDiT",
    heads="n_heads",
    rules=(
        ModuleRule("noise_refiner.0", inputs=(Split("x", "image"),)),
        ModuleRule("noise_refiner.*", inputs=_block_inputs("image"), attention=SelfAttention(("image",))),
        ModuleRule("noise_refiner.-1", gather=Gather(("image",))),
        ModuleRule("layers.0", inputs=(Split("x", "joint"),)),
        ModuleRule("layers.*", inputs=_block_inputs("joint"), attention=SelfAttention(("joint",))),
        ModuleRule(
            "final_layer",
            inputs=(
                Local("x", ("joint",)),
                LocalRanges("timestep_zero_index", "joint", optional=True),
                Replicated("c"),
            ),
            # After the projection: 64 channels travel instead of 3840.
            gather=Gather(("joint",)),
        ),
    ),
    methods=frozenset(ParallelMethod),
)
