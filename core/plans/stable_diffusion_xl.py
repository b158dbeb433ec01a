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
from ..parallel.tensor_plan import (
    ColumnParallel,
    LocalAttribute,
    RowParallel,
    TensorPlan,
    TensorRule,
    Unit,
)

_STACKS = ("input_blocks.*.*", "middle_block.*", "output_blocks.*.*")


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


def _tensor_units(stack: str) -> tuple[Unit, ...]:
    """Return the units of one kind of stack; deeper levels have more."""
    scope = f"{stack}.transformer_blocks.*"
    return (
        Unit("heads", channels="attn1.to_q.out_features", count="n_heads", scope=scope, optional=True),
        Unit("mlp", channels="ff.net.2.in_features", scope=scope, optional=True),
    )


def _tensor_rules(stack: str) -> tuple[TensorRule, ...]:
    blocks = f"{stack}.transformer_blocks.*"
    attentions = (f"{blocks}.attn1", f"{blocks}.attn2")
    return (
        *(
            ColumnParallel(f"{attention}.{name}", parts=("heads",), optional=True)
            for attention in attentions
            for name in ("to_q", "to_k", "to_v")
        ),
        *(RowParallel(f"{attention}.to_out.0", parts=("heads",), optional=True) for attention in attentions),
        *(LocalAttribute(attention, name="heads", unit="heads", optional=True) for attention in attentions),
        # Values and their gates in one layer.
        ColumnParallel(f"{blocks}.ff.net.0.proj", parts=("mlp", "mlp"), optional=True),
        RowParallel(f"{blocks}.ff.net.2", parts=("mlp",), optional=True),
    )


PLAN = ModelPlan(
    name="Stable Diffusion XL",
    class_path="comfy.ldm.modules.diffusionmodules.openaimodel.UNetModel",
    # Deeper levels have more.
    heads="input_blocks.*.*.transformer_blocks.0.n_heads",
    rules=(*(rule for stack in _STACKS for rule in _stack_rules(stack)),),
    methods=frozenset(ParallelMethod),
    whole_sequence_patches=frozenset(
        {"emb_patch", "input_block_patch", "input_block_patch_after_skip", "output_block_patch"}
    ),
    tensor=TensorPlan(
        units=tuple(unit for stack in _STACKS for unit in _tensor_units(stack)),
        rules=tuple(rule for stack in _STACKS for rule in _tensor_rules(stack)),
    ),
)
