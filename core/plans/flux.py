"""Plan of ComfyUI's ``Flux`` class.

One class runs FLUX.1-dev and Kontext, FLUX.2-dev and klein, LongCat-Image(-Edit) and Ovis-Image.
Double blocks keep text and image apart; single blocks get them as one tensor, text first. Between
them the model joins and cuts by ``txt.shape[1]``, which is this rank's length and so right as it is.
Reference latents are image tokens.
"""

from __future__ import annotations

from ..parallel.plan import (
    ControlResiduals,
    Gather,
    Local,
    LocalSlices,
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
    RowParallel,
    TensorPlan,
    TensorRule,
    Unit,
)

_QKV = ("heads", "heads", "heads")
_GATED = "/double_blocks.0.img_mlp.1.gate_fn"
_SINGLE_ACTIVATION = "/single_blocks.0.mlp_act"


def _stream_rules(stream: str) -> tuple[TensorRule, ...]:
    """Return the rules for one stream of the double blocks; feed-forwards come plain, gated or as three."""
    block = f"double_blocks.*.{stream}"
    return (
        ColumnParallel(f"{block}_attn.qkv", parts=_QKV),
        RowParallel(f"{block}_attn.proj", parts=("heads",)),
        ColumnParallel(f"{block}_mlp.0", parts=("mlp",), lacking=_GATED, optional=True),
        ColumnParallel(f"{block}_mlp.0", parts=("mlp", "mlp"), having=_GATED, optional=True),
        RowParallel(f"{block}_mlp.2", parts=("mlp",), optional=True),
        ColumnParallel(f"{block}_mlp.gate_proj", parts=("mlp",), optional=True),
        ColumnParallel(f"{block}_mlp.up_proj", parts=("mlp",), optional=True),
        RowParallel(f"{block}_mlp.down_proj", parts=("mlp",), optional=True),
        GatheredColumn(f"{block}_mod.lin", optional=True),
    )


# HunyuanVideo has the same blocks.
BLOCK_TENSOR_RULES = (
    *_stream_rules("img"),
    *_stream_rules("txt"),
    LocalAttribute("double_blocks.*", name="num_heads", unit="heads"),
    # The activation tells the feed-forward: GELU is plain, the others are gated and twice as wide.
    ColumnParallel(
        "single_blocks.*.linear1",
        parts=(*_QKV, "mlp"),
        having=f"{_SINGLE_ACTIVATION}.approximate",
        optional=True,
    ),
    ColumnParallel(
        "single_blocks.*.linear1",
        parts=(*_QKV, "mlp", "mlp"),
        lacking=f"{_SINGLE_ACTIVATION}.approximate",
        optional=True,
    ),
    RowParallel("single_blocks.*.linear2", parts=("heads", "mlp"), optional=True),
    GatheredColumn("single_blocks.*.modulation.lin", optional=True),
    LocalAttribute("single_blocks.*", name="num_heads", unit="heads", optional=True),
    # Read only where the output of linear1 is cut in two.
    LocalAttribute("single_blocks.*", name="hidden_size", unit="heads", optional=True),
    LocalAttribute("single_blocks.*", name="mlp_hidden_dim_first", unit="mlp", optional=True),
    GatheredColumn("final_layer.adaLN_modulation.1"),
)

_JOINT = ("txt", "img")
# Modulation is a vector for each sample, and the mask [L, L] is indexed by the attention.
_WHOLE = (Replicated("vec"), Replicated("attn_mask"), Replicated("transformer_options"))

PLAN = ModelPlan(
    name="Flux",
    class_path="comfy.ldm.flux.model.Flux",
    heads="num_heads",
    rules=(
        ModuleRule("double_blocks.0", inputs=(Split("txt", "txt"), Split("img", "img"))),
        ModuleRule(
            "double_blocks.*",
            inputs=(
                Local("txt", ("txt",)),
                Local("img", ("img",)),
                Shard("pe", _JOINT, dim=2),
                # Which image tokens are modulated as timestep 0 (FLUX.2 references).
                LocalSlices("modulation_dims_img", "img"),
                LocalSlices("modulation_dims_txt", "txt"),
                *_WHOLE,
            ),
            attention=SelfAttention(_JOINT),
        ),
        ModuleRule(
            "single_blocks.*",
            inputs=(
                Local("x", _JOINT),
                Shard("pe", _JOINT, dim=2),
                LocalSlices("modulation_dims", "img", after="txt"),
                *_WHOLE,
            ),
            attention=SelfAttention(_JOINT),
        ),
        ModuleRule(
            "final_layer",
            inputs=(Local("x", ("img",)), LocalSlices("modulation_dims", "img"), Replicated("vec")),
            # After the projection: 64 channels travel instead of 3072.
            gather=Gather(("img",), discard=("txt",)),
        ),
    ),
    methods=frozenset(ParallelMethod),
    control=ControlResiduals("control", keys=("input", "output"), stream="img"),
    whole_sequence_patches=frozenset({"post_input"}),
    tensor=TensorPlan(
        units=(
            Unit("heads", channels="hidden_size", count="num_heads"),
            Unit("mlp", channels="single_blocks.0.mlp_hidden_dim"),
        ),
        rules=(
            *BLOCK_TENSOR_RULES,
            # FLUX.2 has one modulation for all blocks.
            GatheredColumn("double_stream_modulation_img.lin", optional=True),
            GatheredColumn("double_stream_modulation_txt.lin", optional=True),
            GatheredColumn("single_stream_modulation.lin", optional=True),
        ),
    ),
)
