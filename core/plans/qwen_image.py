"""Plan of ComfyUI's ``QwenImageTransformer2DModel`` class.

Runs Qwen-Image, -Edit, -Edit-2509, -Edit-2511 and -Layered; they differ in reference latents, which
are image tokens. An empty prompt has about five text tokens, so with many ranks some have none.
"""

from __future__ import annotations

from ..parallel.plan import (
    ControlResiduals,
    Gather,
    Local,
    LocalIndex,
    MaskKeys,
    ModelPlan,
    ModuleRule,
    ParallelMethod,
    Replicated,
    SelfAttention,
    Shard,
    Split,
)

PLAN = ModelPlan(
    name="Qwen-Image",
    class_path="comfy.ldm.qwen_image.model.QwenImageTransformer2DModel",
    heads="transformer_blocks.0.attn.heads",
    rules=(
        ModuleRule(
            "transformer_blocks.0",
            inputs=(Split("encoder_hidden_states", "txt"), Split("hidden_states", "img")),
        ),
        ModuleRule(
            "transformer_blocks.*",
            inputs=(
                Local("encoder_hidden_states", ("txt",)),
                Local("hidden_states", ("img",)),
                Shard("image_rotary_emb", ("txt", "img"), dim=2),
                Shard("encoder_hidden_states_mask", ("txt",)),
                # Where the references begin, which are modulated as timestep 0 (2511). Newer class only.
                LocalIndex("timestep_zero_index", "img", optional=True),
                Replicated("temb"),
                Replicated("transformer_options"),
            ),
            # Each block builds the joint key mask from its own text mask and image length.
            attention=SelfAttention(("txt", "img"), mask=MaskKeys.LOCAL),
        ),
        ModuleRule("norm_out", inputs=(Local("x", ("img",)), Replicated("conditioning_embedding"))),
        # After the projection: 64 channels travel instead of 3072.
        ModuleRule("proj_out", gather=Gather(("img",), discard=("txt",))),
    ),
    methods=frozenset(ParallelMethod),
    control=ControlResiduals("control", keys=("input",), stream="img"),
    whole_sequence_patches=frozenset({"post_input"}),
)
