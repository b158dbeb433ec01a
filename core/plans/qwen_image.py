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
from ..parallel.tensor_plan import (
    ColumnParallel,
    GatheredColumn,
    LocalAttribute,
    RowParallel,
    TensorPlan,
    TensorRule,
    Unit,
)

_PROJECTIONS = ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj")
_FIRST_ATTENTION = "transformer_blocks.0.attn"
_ATTENTION = "transformer_blocks.*.attn"


def _stream_rules(stream: str) -> tuple[TensorRule, ...]:
    return (
        ColumnParallel(f"transformer_blocks.*.{stream}_mlp.net.0.proj", parts=("mlp",)),
        RowParallel(f"transformer_blocks.*.{stream}_mlp.net.2", parts=("mlp",)),
        # A third of all bytes.
        GatheredColumn(f"transformer_blocks.*.{stream}_mod.1"),
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
    tensor=TensorPlan(
        units=(
            Unit("heads", channels=f"{_FIRST_ATTENTION}.inner_dim", count=f"{_FIRST_ATTENTION}.heads"),
            Unit("mlp", channels="transformer_blocks.0.img_mlp.net.2.in_features"),
        ),
        rules=(
            *(ColumnParallel(f"{_ATTENTION}.{name}", parts=("heads",)) for name in _PROJECTIONS),
            RowParallel(f"{_ATTENTION}.to_out.0", parts=("heads",)),
            RowParallel(f"{_ATTENTION}.to_add_out", parts=("heads",)),
            LocalAttribute(_ATTENTION, name="heads", unit="heads"),
            *_stream_rules("img"),
            *_stream_rules("txt"),
            GatheredColumn("time_text_embed.timestep_embedder.linear_1"),
            GatheredColumn("time_text_embed.timestep_embedder.linear_2"),
            GatheredColumn("norm_out.linear"),
        ),
    ),
)
