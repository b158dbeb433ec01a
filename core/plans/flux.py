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
)
