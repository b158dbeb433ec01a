"""Plan of ComfyUI's ``OpenAISignatureMMDITWrapper`` class.

Runs Stable Diffusion 3, 3.5 large and 3.5 medium. Blocks take text and image by position. In the first
blocks of 3.5 medium a second attention follows, over the image alone. Positions are added before the
blocks, and there is no mask. The class has no ``_forward``.
"""

from __future__ import annotations

from ..parallel.plan import (
    ControlResiduals,
    Gather,
    Local,
    ModelPlan,
    ModuleRule,
    ParallelMethod,
    Replicated,
    SelfAttention,
    Split,
)

_TEXT, _IMAGE = "args[0]", "args[1]"
_JOINT = SelfAttention(("txt", "img"))

PLAN = ModelPlan(
    name="Stable Diffusion 3",
    class_path="comfy.ldm.modules.diffusionmodules.mmdit.OpenAISignatureMMDITWrapper",
    heads="joint_blocks.0.x_block.attn.num_heads",
    rules=(
        ModuleRule("joint_blocks.0", inputs=(Split(_TEXT, "txt"), Split(_IMAGE, "img"))),
        ModuleRule(
            "joint_blocks.*",
            inputs=(
                Local(_TEXT, ("txt",)),
                Local(_IMAGE, ("img",)),
                Replicated("c"),
                Replicated("use_checkpoint"),
                Replicated("transformer_options"),
            ),
            attention=_JOINT,
        ),
        ModuleRule("joint_blocks.*", attention=(_JOINT, SelfAttention(("img",))), having="x_block.attn2"),
        ModuleRule(
            "final_layer",
            inputs=(Local("x", ("img",)), Replicated("c")),
            # After the projection: 64 channels travel instead of 2432.
            gather=Gather(("img",), discard=("txt",)),
        ),
    ),
    methods=frozenset(ParallelMethod),
    control=ControlResiduals("control", keys=("output",), stream="img", whole=True),
)
