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

_METHODS = frozenset({ParallelMethod.CFG, ParallelMethod.RING, ParallelMethod.ULYSSES})
# With the option a block passes its values on instead of attending.
_VIDEO_ATTENTION = SelfAttention(("video",), unless_option="stg_skip_self_attn")
# Newer models have it; their position table is a pair of a table and a flag.
_NEWER = "/split_positional_embedding"

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
    methods=_METHODS,
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
    methods=_METHODS,
)
