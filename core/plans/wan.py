"""Plan of ComfyUI's ``WanModel`` class.

Runs Wan 2.1 and 2.2 text-to-video, image-to-video (both experts) and TI2V-5B. The subclasses (VACE,
camera, S2V, HuMo, Animate, ...) add streams or audio windows of their own and have no plan here.
Reference and context latents are video tokens. The class reads no ControlNet residuals.
"""

from __future__ import annotations

from ..parallel.plan import (
    ExpandThenShard,
    Gather,
    Local,
    LocalAttention,
    ModelPlan,
    ModuleRule,
    ParallelMethod,
    Replicated,
    SelfAttention,
    Shard,
    Split,
)

# One row for a clip, or one for each frame when frames have timesteps of their own (TI2V).
_MODULATION = ExpandThenShard("e", "img")

PLAN = ModelPlan(
    name="Wan",
    class_path="comfy.ldm.wan.model.WanModel",
    heads="num_heads",
    rules=(
        ModuleRule("blocks.0", inputs=(Split("x", "img"),)),
        ModuleRule(
            "blocks.*",
            inputs=(
                Local("x", ("img",)),
                Shard("freqs", ("img",)),
                _MODULATION,
                Replicated("context"),
                Replicated("context_img_len"),
                Replicated("transformer_options"),
            ),
        ),
        ModuleRule("blocks.*.self_attn", attention=SelfAttention(("img",))),
        ModuleRule("blocks.*.cross_attn", attention=LocalAttention()),
        ModuleRule(
            "head",
            inputs=(Local("x", ("img",)), _MODULATION),
            # After the projection: 64 channels travel (192 for the 5B model) instead of 5120.
            gather=Gather(("img",)),
        ),
    ),
    methods=frozenset(ParallelMethod),
)
