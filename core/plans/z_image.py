"""Plan of ComfyUI's ``NextDiT`` class.

Runs Z-Image, Z-Image-Turbo and Lumina 2. Two regions: the noise refiner over the image tokens, then the
layers over text and image as one stream, which the model has joined (and padded) before. The text and
reference refiners are small and run whole on every rank. Reference latents are image tokens.
"""

from __future__ import annotations

from ..parallel.plan import (
    Absent,
    Gather,
    InputAction,
    Local,
    LocalRanges,
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


def _block_inputs(stream: str) -> tuple[InputAction, ...]:
    return (
        Local("x", (stream,)),
        Shard("freqs_cis", (stream,)),
        # Which tokens are modulated as timestep 0 (references). Newer class only.
        LocalRanges("timestep_zero_index", stream, optional=True),
        # Both regions are without one; the model pads by learned tokens, which are attended to.
        Absent("x_mask"),
        Replicated("adaln_input"),
        Replicated("transformer_options"),
    )


_ATTENTION = "layers.0.attention"
_KEY_HEADS, _QUERY_HEADS = "key-value heads", "query heads"


def _tensor_rules(blocks: str, *, optional: bool = False) -> tuple[TensorRule, ...]:
    attention, feed_forward = f"{blocks}.attention", f"{blocks}.feed_forward"
    return (
        ColumnParallel(f"{attention}.qkv", parts=(_QUERY_HEADS, _KEY_HEADS, _KEY_HEADS), optional=optional),
        RowParallel(f"{attention}.out", parts=(_QUERY_HEADS,), optional=optional),
        LocalAttribute(attention, name="n_local_heads", unit=_QUERY_HEADS, optional=optional),
        LocalAttribute(attention, name="n_local_kv_heads", unit=_KEY_HEADS, optional=optional),
        ColumnParallel(f"{feed_forward}.w1", parts=("mlp",), optional=optional),
        ColumnParallel(f"{feed_forward}.w3", parts=("mlp",), optional=optional),
        RowParallel(f"{feed_forward}.w2", parts=("mlp",), optional=optional),
        # Text and reference refiners are not modulated.
        GatheredColumn(f"{blocks}.adaLN_modulation.-1", optional=True),
    )


PLAN = ModelPlan(
    name="Z-Image",
    class_path="comfy.ldm.lumina.model.NextDiT",
    heads="n_heads",
    rules=(
        ModuleRule("noise_refiner.0", inputs=(Split("x", "image"),)),
        ModuleRule("noise_refiner.*", inputs=_block_inputs("image"), attention=SelfAttention(("image",))),
        ModuleRule("noise_refiner.-1", gather=Gather(("image",))),
        ModuleRule("layers.0", inputs=(Split("x", "joint"),)),
        ModuleRule("layers.*", inputs=_block_inputs("joint"), attention=SelfAttention(("joint",))),
        ModuleRule(
            "final_layer",
            inputs=(
                Local("x", ("joint",)),
                LocalRanges("timestep_zero_index", "joint", optional=True),
                Replicated("c"),
            ),
            # After the projection: 64 channels travel instead of 3840.
            gather=Gather(("joint",)),
        ),
    ),
    methods=frozenset(ParallelMethod),
    tensor=TensorPlan(
        units=(
            # Lumina 2 shares each key and value among three heads, which stay on its rank.
            Unit(
                _KEY_HEADS,
                channels=(f"{_ATTENTION}.n_kv_heads", f"{_ATTENTION}.head_dim"),
                count=f"{_ATTENTION}.n_kv_heads",
            ),
            Unit(
                _QUERY_HEADS,
                channels=f"{_ATTENTION}.out.in_features",
                count=f"{_ATTENTION}.n_kv_heads",
            ),
            Unit("mlp", channels="layers.0.feed_forward.w2.in_features"),
        ),
        rules=(
            *_tensor_rules("layers.*"),
            *_tensor_rules("noise_refiner.*"),
            *_tensor_rules("context_refiner.*"),
            *_tensor_rules("siglip_refiner.*", optional=True),
            GatheredColumn("final_layer.adaLN_modulation.1"),
        ),
    ),
)
