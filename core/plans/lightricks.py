"""Plans of ComfyUI's ``LTXVModel`` and ``LTXAVModel`` classes.

The first runs LTX-Video (and the video-only form of LTX-2), the second LTX-2.x, which makes video and
audio together. Video tokens are sharded. Audio has few tokens, so every rank has all of them and computes
the same; where audio attends to video, each rank attends to its part of the keys.

A guide with an attention strength of its own brings a mask object that splits the queries into several
attention calls; it is refused. Guides at full strength, keyframes, masks of frames and perturbed
self-attention (STG) are covered. Output modulation is inline code with a row for each token, so the gather
comes before it.
"""

from __future__ import annotations

from ..parallel.plan import (
    Absent,
    ExpandRowsThenShard,
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
    ShardedKeysAttention,
    Split,
)
from ..parallel.tensor_plan import (
    ColumnParallel,
    GatheredColumn,
    LocalArgument,
    LocalAttribute,
    NormAcrossRanks,
    RowParallel,
    TensorPlan,
    TensorRule,
    Unit,
)

# With the option a block passes its values on instead of attending.
_VIDEO_ATTENTION = SelfAttention(("video",), unless_option="stg_skip_self_attn")
# Newer models have it; their position table is a pair of a table and a flag.
_NEWER = "/split_positional_embedding"


def _attention_rules(path: str, heads: str, tables: tuple[str, ...] = ()) -> tuple[TensorRule, ...]:
    """Return the rules for one attention; query and key are normalized over all heads together.

    Args:
        path: Path of the attention.
        heads: Its heads.
        tables: Arguments that hold positions, with other numbers for each head.
    """
    return (
        *(ColumnParallel(f"{path}.{name}", parts=(heads,)) for name in ("to_q", "to_k", "to_v")),
        # A factor for each head; LTX-Video has none.
        ColumnParallel(f"{path}.to_gate_logits", having="weight", parts=(f"{heads}, gates",), optional=True),
        RowParallel(f"{path}.to_out.0", parts=(heads,)),
        *(NormAcrossRanks(f"{path}.{name}", parts=(heads,)) for name in ("q_norm", "k_norm")),
        LocalAttribute(path, name="heads", unit=heads),
        *(LocalArgument(path, argument=name, unit=heads, dim=2, having=_NEWER) for name in tables),
        *(LocalArgument(path, argument=name, unit=heads, dim=3, lacking=_NEWER) for name in tables),
    )


def _feed_forward_rules(path: str, unit: str) -> tuple[TensorRule, ...]:
    return (ColumnParallel(f"{path}.net.0.proj", parts=(unit,)), RowParallel(f"{path}.net.2", parts=(unit,)))


def _modulation_rules(*names: str) -> tuple[TensorRule, ...]:
    return tuple(GatheredColumn(f"{name}.linear", optional=True) for name in names)


VIDEO_PLAN = ModelPlan(
    name="LTX-Video",
    class_path="comfy.ldm.lightricks.model.LTXVModel",
    heads="transformer_blocks.0.attn1.heads",
    rules=(
        ModuleRule("transformer_blocks.0", inputs=(Split("x", "video"),)),
        ModuleRule(
            "transformer_blocks.*",
            inputs=(
                Local("x", ("video",)),
                # One row for a clip, for a frame or for a token.
                ExpandThenShard("timestep", "video"),
                Absent("self_attention_mask", optional=True),
                Replicated("prompt_timestep", optional=True),
                Replicated("context"),
                Replicated("attention_mask"),
                Replicated("transformer_options"),
            ),
        ),
        ModuleRule(
            "transformer_blocks.*", inputs=(Shard("pe[0]", ("video",)), Replicated("pe[1]")), having=_NEWER
        ),
        ModuleRule("transformer_blocks.*", inputs=(Shard("pe", ("video",), dim=2),), lacking=_NEWER),
        ModuleRule("transformer_blocks.*.attn1", attention=_VIDEO_ATTENTION),
        ModuleRule("transformer_blocks.*.attn2", attention=LocalAttention()),
        ModuleRule("transformer_blocks.-1", gather=Gather(("video",))),
    ),
    methods=frozenset(ParallelMethod),
    tensor=TensorPlan(
        units=(
            Unit("heads", channels="inner_dim", count="transformer_blocks.0.attn1.heads"),
            Unit("mlp", channels="transformer_blocks.0.ff.net.2.in_features"),
        ),
        rules=(
            *_attention_rules("transformer_blocks.*.attn1", "heads", tables=("pe",)),
            *_attention_rules("transformer_blocks.*.attn2", "heads"),
            *_feed_forward_rules("transformer_blocks.*.ff", "mlp"),
            # Modulation in the blocks is a table of numbers, which stays whole.
            *_modulation_rules("adaln_single", "prompt_adaln_single"),
        ),
    ),
)


def _frame_rows(argument: str) -> ExpandRowsThenShard:
    return ExpandRowsThenShard(
        argument, "video", rows="data", run_length="patches_per_frame", num_rows="num_frames"
    )


_WHOLE = (
    "v_context", "a_context", "attention_mask", "a_timestep", "a_pe", "a_cross_pe",
    "a_cross_scale_shift_timestep", "a_cross_gate_timestep", "v_prompt_timestep", "a_prompt_timestep",
    "transformer_options",
)  # fmt: skip

_AUDIO_MODULATION = (
    "audio_adaln_single", "audio_prompt_adaln_single", "av_ca_video_scale_shift_adaln_single",
    "av_ca_a2v_gate_adaln_single", "av_ca_audio_scale_shift_adaln_single", "av_ca_v2a_gate_adaln_single",
)  # fmt: skip

AUDIO_VIDEO_PLAN = ModelPlan(
    name="LTX-2",
    class_path="comfy.ldm.lightricks.av_model.LTXAVModel",
    heads="num_attention_heads",
    rules=(
        ModuleRule("transformer_blocks.0", inputs=(Split("x[0]", "video"),)),
        ModuleRule(
            "transformer_blocks.*",
            inputs=(
                Local("x[0]", ("video",)),
                Replicated("x[1]"),
                Shard("v_pe[0]", ("video",)),
                Replicated("v_pe[1]"),
                Shard("v_cross_pe[0]", ("video",)),
                Replicated("v_cross_pe[1]"),
                _frame_rows("v_timestep"),
                _frame_rows("v_cross_scale_shift_timestep"),
                _frame_rows("v_cross_gate_timestep"),
                Absent("self_attention_mask"),
                *map(Replicated, _WHOLE),
            ),
        ),
        ModuleRule("transformer_blocks.*.attn1", attention=_VIDEO_ATTENTION),
        ModuleRule("transformer_blocks.*.attn2", attention=LocalAttention()),
        ModuleRule("transformer_blocks.*.audio_attn1", attention=LocalAttention()),
        ModuleRule("transformer_blocks.*.audio_attn2", attention=LocalAttention()),
        ModuleRule("transformer_blocks.*.audio_to_video_attn", attention=LocalAttention()),
        ModuleRule("transformer_blocks.*.video_to_audio_attn", attention=ShardedKeysAttention(("video",))),
        ModuleRule("transformer_blocks.-1", gather=Gather(("video",), item=0)),
    ),
    methods=frozenset(ParallelMethod),
    tensor=TensorPlan(
        units=(
            Unit("heads", channels="inner_dim", count="num_attention_heads"),
            Unit("heads, gates", channels="num_attention_heads", count="num_attention_heads"),
            Unit("audio heads", channels="audio_inner_dim", count="audio_num_attention_heads"),
            Unit(
                "audio heads, gates", channels="audio_num_attention_heads", count="audio_num_attention_heads"
            ),
            Unit("mlp", channels="transformer_blocks.0.ff.net.2.in_features"),
            Unit("audio mlp", channels="transformer_blocks.0.audio_ff.net.2.in_features"),
        ),
        rules=(
            *_attention_rules("transformer_blocks.*.attn1", "heads", tables=("pe",)),
            *_attention_rules("transformer_blocks.*.attn2", "heads"),
            *_attention_rules("transformer_blocks.*.audio_attn1", "audio heads", tables=("pe",)),
            *_attention_rules("transformer_blocks.*.audio_attn2", "audio heads"),
            *_attention_rules(
                "transformer_blocks.*.audio_to_video_attn", "audio heads", tables=("pe", "k_pe")
            ),
            *_attention_rules(
                "transformer_blocks.*.video_to_audio_attn", "audio heads", tables=("pe", "k_pe")
            ),
            *_feed_forward_rules("transformer_blocks.*.ff", "mlp"),
            *_feed_forward_rules("transformer_blocks.*.audio_ff", "audio mlp"),
            *_modulation_rules("adaln_single", "prompt_adaln_single", *_AUDIO_MODULATION),
        ),
    ),
)
