"""Plan of ComfyUI's ``UNetModel`` class.

Runs Stable Diffusion XL and its refiner, and the other UNets of this class (1.5, 2.x). Each attention
stack is a region of its own: its tokens are cut before the first block and gathered after the last.
Convolutions, and the group norms between them, run whole on every rank, which keeps them exact at any
size (a rank with a part of the rows would need its neighbours' rows and sums in every one of them).
Sequences are short here, so CFG parallel gains more.

ControlNet residuals are added between the regions, to whole tensors. Video UNets of this class (SVD) mix
frames between the blocks of a stack; with more than one block in a stack they are refused when they run.
"""

from __future__ import annotations

from ..parallel.plan import (
    Gather,
    Local,
    LocalAttention,
    ModelPlan,
    ModuleRule,
    ParallelMethod,
    Replicated,
    SelfAttention,
    Split,
)


def _stack_rules(stack: str) -> tuple[ModuleRule, ...]:
    blocks = f"{stack}.transformer_blocks"
    return (
        ModuleRule(f"{blocks}.0", inputs=(Split("x", "tokens"),), optional=True),
        ModuleRule(
            f"{blocks}.*",
            inputs=(Local("x", ("tokens",)), Replicated("context"), Replicated("transformer_options")),
            optional=True,
        ),
        ModuleRule(f"{blocks}.*.attn1", attention=SelfAttention(("tokens",)), optional=True),
        ModuleRule(f"{blocks}.*.attn2", attention=LocalAttention(), optional=True),
        ModuleRule(f"{blocks}.-1", gather=Gather(("tokens",)), optional=True),
    )


PLAN = ModelPlan(
    name="Stable Diffusion XL",
    class_path="comfy.ldm.modules.diffusionmodules.openaimodel.UNetModel",
    # Deeper levels have more.
    heads="input_blocks.*.*.transformer_blocks.0.n_heads",
    rules=(
        *_stack_rules("input_blocks.*.*"),
        *_stack_rules("middle_block.*"),
        *_stack_rules("output_blocks.*.*"),
    ),
    methods=frozenset({ParallelMethod.CFG, ParallelMethod.RING, ParallelMethod.ULYSSES}),
    whole_sequence_patches=frozenset(
        {"emb_patch", "input_block_patch", "input_block_patch_after_skip", "output_block_patch"}
    ),
)
