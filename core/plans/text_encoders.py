"""Tensor plans of ComfyUI's large text encoders: T5-XXL and UMT5-XXL, and the Llama-like language models.

Their forward is one prompt long, so only weights are cut: no stream is, and no rule of a sequence is here.
The key heads of the language models are few (4 in Qwen2.5-VL), and each keeps its query heads on its rank.
"""

from __future__ import annotations

from ..parallel.plan import ModelPlan, ParallelMethod
from ..parallel.tensor_plan import (
    ColumnParallel,
    EmbeddingColumn,
    GatheredColumn,
    LocalAttribute,
    RowParallel,
    TensorPlan,
    TensorRule,
    Unit,
)

_KEY_HEADS, _QUERY_HEADS = "key-value heads", "query heads"


def _t5() -> ModelPlan:
    first, attention = "encoder.block.0.layer.0.SelfAttention", "encoder.block.*.layer.0.SelfAttention"
    feed_forward = "encoder.block.*.layer.1.DenseReluDense"
    return ModelPlan(
        name="T5",
        class_path="comfy.text_encoders.t5.T5",
        heads=f"{first}.num_heads",
        rules=(),
        methods=frozenset({ParallelMethod.TENSOR}),
        tensor=TensorPlan(
            units=(
                Unit("heads", channels=f"{first}.q.out_features", count=f"{first}.num_heads"),
                Unit("position biases", channels=f"{first}.num_heads", count=f"{first}.num_heads"),
                Unit("mlp", channels="encoder.block.0.layer.1.DenseReluDense.wo.in_features"),
            ),
            rules=(
                *(ColumnParallel(f"{attention}.{name}", parts=("heads",)) for name in ("q", "k", "v")),
                RowParallel(f"{attention}.o", parts=("heads",)),
                # T5 has it in the first block, which hands its own heads' bias on; UMT5 in every block.
                EmbeddingColumn(f"{attention}.relative_attention_bias", parts=("position biases",)),
                LocalAttribute(attention, name="num_heads", unit="heads"),
                ColumnParallel(f"{feed_forward}.wi", parts=("mlp",), optional=True),
                ColumnParallel(f"{feed_forward}.wi_0", parts=("mlp",), optional=True),
                ColumnParallel(f"{feed_forward}.wi_1", parts=("mlp",), optional=True),
                RowParallel(f"{feed_forward}.wo", parts=("mlp",)),
                GatheredColumn("shared"),
            ),
        ),
    )


def _vision_rules(tower: str) -> tuple[TensorRule, ...]:
    attention, feed_forward = f"{tower}.blocks.*.attn", f"{tower}.blocks.*.mlp"
    return (
        ColumnParallel(f"{attention}.qkv", parts=("vision heads",) * 3),
        RowParallel(f"{attention}.proj", parts=("vision heads",)),
        LocalAttribute(attention, name="num_heads", unit="vision heads"),
        ColumnParallel(f"{feed_forward}.gate_proj", parts=("vision mlp",)),
        ColumnParallel(f"{feed_forward}.up_proj", parts=("vision mlp",)),
        RowParallel(f"{feed_forward}.down_proj", parts=("vision mlp",)),
    )


def _language_model(title: str, class_name: str, *, vision: str = "") -> ModelPlan:
    first, attention = "model.layers.0.self_attn", "model.layers.*.self_attn"
    feed_forward = "model.layers.*.mlp"
    vision_units = (
        Unit(
            "vision heads",
            channels=f"{vision}.blocks.0.attn.qkv.in_features",
            count=f"{vision}.blocks.0.attn.num_heads",
        ),
        Unit("vision mlp", channels=f"{vision}.blocks.0.mlp.down_proj.in_features"),
    )
    keys = f"{first}.num_kv_heads"
    projections = (("q_proj", _QUERY_HEADS), ("k_proj", _KEY_HEADS), ("v_proj", _KEY_HEADS))
    return ModelPlan(
        name=title,
        class_path=f"comfy.text_encoders.llama.{class_name}",
        heads=f"{first}.num_heads",
        rules=(),
        methods=frozenset({ParallelMethod.TENSOR}),
        tensor=TensorPlan(
            units=(
                Unit(_KEY_HEADS, channels=(keys, f"{first}.head_dim"), count=keys),
                Unit(_QUERY_HEADS, channels=f"{first}.inner_size", count=keys),
                Unit("mlp", channels="model.layers.0.mlp.down_proj.in_features"),
                *(vision_units if vision else ()),
            ),
            rules=(
                *(
                    ColumnParallel(f"{attention}.{end}", parts=(unit,), optional=True)
                    for end, unit in projections
                ),
                # Some checkpoints of newer ComfyUI store them fused.
                ColumnParallel(
                    f"{attention}.qkv_proj", parts=(_QUERY_HEADS, _KEY_HEADS, _KEY_HEADS), optional=True
                ),
                RowParallel(f"{attention}.o_proj", parts=(_QUERY_HEADS,)),
                LocalAttribute(attention, name="num_heads", unit=_QUERY_HEADS),
                LocalAttribute(attention, name="num_kv_heads", unit=_KEY_HEADS),
                LocalAttribute(attention, name="inner_size", unit=_QUERY_HEADS),
                LocalAttribute(attention, name="kv_size", unit=_KEY_HEADS, having="kv_size"),
                ColumnParallel(f"{feed_forward}.gate_proj", parts=("mlp",), optional=True),
                ColumnParallel(f"{feed_forward}.up_proj", parts=("mlp",), optional=True),
                ColumnParallel(f"{feed_forward}.gate_up_proj", parts=("mlp", "mlp"), optional=True),
                RowParallel(f"{feed_forward}.down_proj", parts=("mlp",)),
                GatheredColumn("model.embed_tokens"),
                *(_vision_rules(vision) if vision else ()),
            ),
        ),
    )


PLANS: tuple[ModelPlan, ...] = (
    _t5(),
    _language_model("Qwen2.5-VL 7B", "Qwen25_7BVLI", vision="visual"),
    _language_model("Qwen2.5 3B", "Qwen25_3B"),
    _language_model("Qwen3 4B", "Qwen3_4B"),
    _language_model("Qwen3 8B", "Qwen3_8B"),
    _language_model("Ovis 2.5 2B", "Ovis25_2B"),
    _language_model("Mistral Small 24B", "Mistral3Small24B"),
    _language_model("Llama 3 8B", "Llama2"),
    _language_model("Gemma 2 2B", "Gemma2_2B"),
    _language_model("Gemma 3 12B", "Gemma3_12B"),
)
