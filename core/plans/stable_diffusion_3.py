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
from ..parallel.tensor_plan import (
    ColumnParallel,
    GatheredColumn,
    LocalAttribute,
    RowParallel,
    TensorPlan,
    TensorRule,
    Unit,
)

_TEXT, _IMAGE = "args[0]", "args[1]"
_JOINT = SelfAttention(("txt", "img"))

_FIRST_BLOCK = "joint_blocks.0.x_block"
_FIRST_ATTENTION = f"{_FIRST_BLOCK}.attn"


def _attention_rules(path: str, *, optional: bool = False) -> tuple[TensorRule, ...]:
    return (
        ColumnParallel(f"{path}.qkv", parts=("heads",) * 3, optional=optional),
        RowParallel(f"{path}.proj", parts=("heads",), optional=optional),
        LocalAttribute(path, name="num_heads", unit="heads", optional=optional),
    )


def _stream_rules(block: str) -> tuple[TensorRule, ...]:
    return (
        *_attention_rules(f"joint_blocks.*.{block}.attn"),
        ColumnParallel(f"joint_blocks.*.{block}.mlp.fc1", parts=("mlp",)),
        RowParallel(f"joint_blocks.*.{block}.mlp.fc2", parts=("mlp",)),
        GatheredColumn(f"joint_blocks.*.{block}.adaLN_modulation.1"),
    )


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
    tensor=TensorPlan(
        units=(
            Unit(
                "heads",
                channels=f"{_FIRST_BLOCK}.attn.qkv.in_features",
                count=f"{_FIRST_BLOCK}.attn.num_heads",
            ),
            Unit("mlp", channels=f"{_FIRST_BLOCK}.mlp.fc2.in_features"),
        ),
        rules=(
            *_stream_rules("context_block"),
            *_stream_rules("x_block"),
            *_attention_rules("joint_blocks.*.x_block.attn2", optional=True),
            GatheredColumn("final_layer.adaLN_modulation.1"),
        ),
    ),
)
