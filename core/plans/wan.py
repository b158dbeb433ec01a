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
from ..parallel.tensor_plan import (
    ColumnParallel,
    GatheredColumn,
    LocalAttribute,
    NormAcrossRanks,
    RowParallel,
    TensorPlan,
    TensorRule,
    Unit,
)

# One row for a clip, or one for each frame when frames have timesteps of their own (TI2V).
_NORMS = ("norm_q", "norm_k")
_MODULATION = ExpandThenShard("e", "img")


def _attention_rules(path: str) -> tuple[TensorRule, ...]:
    """Return the rules for one attention; query and key are normalized over all heads together."""
    return (
        *(ColumnParallel(f"{path}.{name}", parts=("heads",)) for name in ("q", "k", "v")),
        RowParallel(f"{path}.o", parts=("heads",)),
        *(NormAcrossRanks(f"{path}.{name}", having="weight", parts=("heads",)) for name in _NORMS),
        LocalAttribute(path, name="num_heads", unit="heads"),
    )


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
    tensor=TensorPlan(
        units=(
            Unit("heads", channels="dim", count="num_heads"),
            Unit("mlp", channels="blocks.0.ffn.2.in_features"),
        ),
        rules=(
            *_attention_rules("blocks.*.self_attn"),
            *_attention_rules("blocks.*.cross_attn"),
            # Of Wan 2.1 image-to-video.
            ColumnParallel("blocks.*.cross_attn.k_img", parts=("heads",), optional=True),
            ColumnParallel("blocks.*.cross_attn.v_img", parts=("heads",), optional=True),
            NormAcrossRanks(
                "blocks.*.cross_attn.norm_k_img", having="weight", parts=("heads",), optional=True
            ),
            ColumnParallel("blocks.*.ffn.0", parts=("mlp",)),
            RowParallel("blocks.*.ffn.2", parts=("mlp",)),
            # Modulation in the blocks is a table of numbers, which stays whole.
            GatheredColumn("time_projection.1"),
        ),
    ),
)
