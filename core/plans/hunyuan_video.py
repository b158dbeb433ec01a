"""Plan of ComfyUI's ``HunyuanVideo`` class.

Runs HunyuanVideo 1.5, and HunyuanVideo 1.0 and HunyuanImage 2.1 without reference latents or guiding
frames (refused: the model cuts references off by their whole length, and modulates single blocks by
positions that ignore the text). Text refiners run whole on every rank.

Blocks are those of Flux. In older ComfyUI the image comes before the text; its blocks have a flag for
it. There the model cuts the image out by its whole length, so some text is left behind it on a rank.
"""

from __future__ import annotations

from ..parallel.plan import (
    Absent,
    ControlResiduals,
    Gather,
    InputAction,
    Local,
    LocalSlices,
    ModelPlan,
    ModuleRule,
    ParallelMethod,
    Replicated,
    SelfAttention,
    Shard,
    Split,
    Truncate,
)
from ..parallel.refused_inputs import RefusedInput
from ..parallel.tensor_plan import TensorPlan, Unit
from .flux import BLOCK_TENSOR_RULES

_TEXT_FIRST, _IMAGE_FIRST = ("txt", "img"), ("img", "txt")
# Of the whole model ("/"), since single blocks do not have it.
_FLAG = "/double_blocks.0.flipped_img_txt"
_WHOLE = (Replicated("vec"), Replicated("attn_mask"), Replicated("transformer_options"))


def _double_inputs(order: tuple[str, ...]) -> tuple[InputAction, ...]:
    return (
        Local("txt", ("txt",)),
        Local("img", ("img",)),
        Shard("pe", order, dim=2),
        LocalSlices("modulation_dims_img", "img"),
        LocalSlices("modulation_dims_txt", "txt"),
        *_WHOLE,
    )


def _single_inputs(order: tuple[str, ...]) -> tuple[InputAction, ...]:
    return (Local("x", order), Shard("pe", order, dim=2), Absent("modulation_dims"), *_WHOLE)


PLAN = ModelPlan(
    name="HunyuanVideo",
    class_path="comfy.ldm.hunyuan_video.model.HunyuanVideo",
    heads="num_heads",
    rules=(
        ModuleRule("double_blocks.0", inputs=(Split("txt", "txt"), Split("img", "img"))),
        ModuleRule(
            "double_blocks.*",
            inputs=_double_inputs(_TEXT_FIRST),
            attention=SelfAttention(_TEXT_FIRST),
            lacking=_FLAG,
        ),
        ModuleRule(
            "double_blocks.*",
            inputs=_double_inputs(_IMAGE_FIRST),
            attention=SelfAttention(_IMAGE_FIRST),
            having=_FLAG,
        ),
        # HunyuanVideo 1.5 has none.
        ModuleRule(
            "single_blocks.*",
            inputs=_single_inputs(_TEXT_FIRST),
            attention=SelfAttention(_TEXT_FIRST),
            lacking=_FLAG,
            optional=True,
        ),
        ModuleRule(
            "single_blocks.*",
            inputs=_single_inputs(_IMAGE_FIRST),
            attention=SelfAttention(_IMAGE_FIRST),
            having=_FLAG,
            optional=True,
        ),
        ModuleRule(
            "final_layer",
            inputs=(
                Truncate("x", ("img",)),
                LocalSlices("modulation_dims", "img"),
                Replicated("vec"),
            ),
            # After the projection: 32 channels travel instead of 2048.
            gather=Gather(("img",), discard=("txt",)),
        ),
    ),
    methods=frozenset(ParallelMethod),
    refused=(
        RefusedInput("ref_latent", "The model cuts its tokens off by their number in the whole sequence"),
        RefusedInput(
            "guiding_frame_index",
            "The model modulates single blocks by positions that ignore the text",
            having="single_blocks.0",
        ),
    ),
    control=ControlResiduals(
        "control",
        keys=("input", "output"),
        stream="img",
        whole=True,
        run_into=("output", "txt"),
        run_into_having=_FLAG,
    ),
    tensor=TensorPlan(
        units=(
            Unit("heads", channels="hidden_size", count="num_heads"),
            Unit("mlp", channels="double_blocks.0.img_mlp.2.in_features"),
        ),
        rules=BLOCK_TENSOR_RULES,
    ),
)
