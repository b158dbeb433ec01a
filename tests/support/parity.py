"""The one tester that every plan passes: a parallel model gives what one rank gives."""

from __future__ import annotations

import copy
import functools
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from comfyui_ferry.core.errors import RequestError
from comfyui_ferry.core.module_hooks import hook_names
from comfyui_ferry.core.parallel import (
    ModelPlan,
    ParallelDims,
    ParallelHandle,
    RankLayout,
    SequenceGroup,
    build_mesh,
    parallelize,
    validate_model,
)
from comfyui_ferry.core.parallel.plan import LocalAttention, ModuleRule, SelfAttention, roles_of
from comfyui_ferry.core.plans import find_plan
from torch import nn

from .tiny_cases import CASES, TinyCase
from .tiny_models import Inputs

# fp32: ranks add the same numbers in another order. About 1e-6 is seen; a lost token gives 1e-2 or more.
TOLERANCE = 1e-5


Output = torch.Tensor | list[torch.Tensor]


def relative_error(output: Output, reference: Output) -> float:
    """Return the largest difference over the largest value; of several outputs, the worst."""
    if isinstance(output, list):
        return max(map(relative_error, output, reference))
    assert isinstance(reference, torch.Tensor)
    return ((output - reference).abs().max() / reference.abs().max()).item()


def plan_of(model: nn.Module) -> ModelPlan:
    """Return the plan of the model's class."""
    return find_plan(f"{type(model).__module__}.{type(model).__qualname__}")


def run_alone(model: nn.Module, inputs: Inputs) -> Any:
    """Return the output of the model by itself."""
    arguments = copied(inputs)
    arguments.setdefault("transformer_options", {})
    with torch.inference_mode():
        return forward_of(model)(**arguments)


def run_parallel(model: nn.Module, handle: ParallelHandle, inputs: Inputs) -> Any:
    """Return the output of the model on all ranks of the handle's group."""
    arguments = copied(inputs)
    options = dict(arguments.get("transformer_options") or {})
    options["optimized_attention_override"] = handle.attention_override
    arguments["transformer_options"] = options
    with torch.inference_mode():
        return handle.run(forward_of(model), **arguments)


def layouts_of(world_size: int) -> list[ParallelDims]:
    """Return every way of sharing one sequence among this many ranks, pure Ulysses first."""
    degrees = [degree for degree in range(1, world_size + 1) if world_size % degree == 0]
    return [ParallelDims(ring=degree, ulysses=world_size // degree) for degree in degrees]


@dataclass(frozen=True)
class CaseReport:
    """What one rank saw of one case.

    Args:
        errors: Relative error in each layout that the rank takes part in.
        inputs_kept: Whether the caller's inputs are what they were, bit for bit.
        restored: Whether the model alone gives what it gave before, bit for bit.
        left: Modules that still have a hook or a forward of their own.
        without_exchange: Relative error on two ranks if every self-attention stays on its rank, or the
            message that refused it; None on other ranks. If it were small, parity would prove nothing.
    """

    errors: dict[ParallelDims, float]
    inputs_kept: bool
    restored: bool
    left: list[str]
    without_exchange: float | str | None = None


def case_report(name: str) -> CaseReport:
    """Run one rank of the tester for a case, in every layout of the pool."""
    case = CASES[name]
    model, inputs = case.build(), case.inputs()
    report = model_report(model, plan_of(model), inputs)
    return replace(report, without_exchange=_error_under(without_exchange(plan_of(model)), model, inputs))


def model_report(model: nn.Module, plan: ModelPlan, inputs: Inputs) -> CaseReport:
    """Run one rank of the tester.

    The forward runs twice on two ranks, so that nothing of one call may leak into the next, and once more
    after the last ``remove()``. CFG branches get different prompts.
    """
    branches = [inputs, inputs | {"context": -inputs["context"]}]
    before = copied(inputs)
    references = [run_alone(model, branch) for branch in branches]
    errors: dict[ParallelDims, float] = {}
    for dims, layout in pool_layouts().items():
        if dist.get_rank() >= dims.world_size or not fits(model, plan, dims):
            continue
        groups = {"group": layout.sequence_group, "tensor_group": layout.tensor_group}
        handle = parallelize(model, plan, **groups)
        outputs = [
            run_parallel(model, handle, branches[layout.cfg_branch])
            for _ in range(2 if dims.world_size == 2 else 1)
        ]
        handle.remove()
        reference = references[layout.cfg_branch]
        errors[dims] = max(relative_error(output, reference) for output in outputs)
    left = [
        path for path, module in model.named_modules() if hook_names(module) or "forward" in module.__dict__
    ]
    return CaseReport(errors, same(before, inputs), same(run_alone(model, inputs), references[0]), left)


def plan_error(name: str, plan: ModelPlan, changes: Inputs) -> float | str | None:
    """Return the error of a case under another plan on two ranks, or the message that refused it.

    None on the pool's other ranks.
    """
    return _error_under(plan, CASES[name].build(), CASES[name].inputs() | changes)


def _error_under(plan: ModelPlan, model: nn.Module, inputs: Inputs) -> float | str | None:
    dims = ParallelDims(ulysses=2)
    group = pool_layouts()[dims].sequence_group
    if dist.get_rank() >= dims.world_size:
        return None
    assert group is not None
    try:
        handle = parallelize(model, plan, group=group)
        return relative_error(run_parallel(model, handle, inputs), run_alone(model, inputs))
    except (RuntimeError, RequestError) as error:
        return str(error)


@functools.cache
def pool_layouts() -> dict[ParallelDims, RankLayout]:
    """Return this rank's place in every layout of 2, 3, ... ranks; collective over all, the first time.

    By Ulysses, by Ring and by every hybrid. Of four ranks also the first two and three by themselves, as
    well by tensor parallel, and the products of two methods.
    """
    world_size = dist.get_world_size()
    layouts: dict[ParallelDims, RankLayout] = {}
    for size in range(2, world_size) if world_size == 4 else ():
        group = dist.new_group(list(range(size)))
        assert isinstance(group, dist.ProcessGroup) or dist.get_rank() >= size
        layouts[ParallelDims(ulysses=size)] = RankLayout(0, SequenceGroup(group, ring=None, ulysses=group))
        layouts[ParallelDims(ring=size)] = RankLayout(0, SequenceGroup(group, ring=group, ulysses=None))
        layouts[ParallelDims(tp=size)] = RankLayout(0, None, group)
    layouts |= {dims: build_mesh(dims) for dims in layouts_of(world_size)}
    more = {4: _MORE_OF_FOUR, 8: MORE_OF_EIGHT}.get(world_size, ())
    return layouts | {dims: build_mesh(dims) for dims in more}


_MORE_OF_FOUR = (
    ParallelDims(tp=4),
    ParallelDims(cfg=2, ulysses=2),
    ParallelDims(tp=2, ulysses=2),
    ParallelDims(tp=2, ring=2),
)


MORE_OF_EIGHT = (
    ParallelDims(tp=8),
    ParallelDims(cfg=2, ulysses=4),
    ParallelDims(cfg=2, ring=2, ulysses=2),
    ParallelDims(cfg=2, tp=2, ulysses=2),
)


def fits(model: nn.Module, plan: ModelPlan, dims: ParallelDims) -> bool:
    """Return whether the model has as many heads as tensor parallel ranks; any other degree is exact."""
    try:
        validate_model(plan, model, ParallelDims(tp=dims.tp))
    except RequestError:
        return False
    return True


def pool_dims() -> list[ParallelDims]:
    """Return the layouts of a pool of four ranks."""
    tensor = [ParallelDims(tp=2), ParallelDims(tp=3)]
    return [*layouts_of(2), *layouts_of(3), *layouts_of(4), *tensor, *_MORE_OF_FOUR]


@dataclass(frozen=True)
class CaseErrors:
    """Relative errors of one case in one dtype.

    Args:
        parallel: All ranks against one rank, both in the dtype.
        rounding: One rank in the dtype against one rank in fp32.
        without_exchange: As ``parallel``, with every self-attention kept on its rank; infinite if the
            model refuses that. A limit that this does not exceed would prove nothing.
    """

    parallel: float
    rounding: float
    without_exchange: float


def named_case_errors(names: list[str], dtype: torch.dtype, dims: ParallelDims) -> dict[str, CaseErrors]:
    """Build each case on this rank's device and return its errors in one layout."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    device = torch.device("cuda") if dist.get_backend() == "nccl" else torch.device("cpu")
    group = sequence_group(dims)
    return {name: _case_errors(CASES[name], group, device, dtype) for name in names}


def without_exchange(plan: ModelPlan) -> ModelPlan:
    """Return the plan, broken: every self-attention stays on its rank."""

    def localised(rule: ModuleRule) -> ModuleRule:
        is_self = any(isinstance(role, SelfAttention) for role in roles_of(rule.attention))
        return replace(rule, attention=LocalAttention()) if is_self else rule

    return replace(plan, rules=tuple(map(localised, plan.rules)))


def _case_errors(
    case: TinyCase, group: SequenceGroup, device: torch.device, dtype: torch.dtype
) -> CaseErrors:
    model = case.build().to(device)
    inputs = moved(case.inputs(), device)
    exact = run_alone(model, inputs)
    model.to(dtype)
    if hasattr(model, "patch_embedding"):  # Wan builds and runs this layer in fp32 whatever the rest is
        model.patch_embedding.float()
    # Embeddings multiply these by 1000: in bf16, 3500 has a spacing of 16, and rounding would hide all else.
    names = ("timestep", "timesteps", "a_timestep", "guidance")
    scalars = {name: inputs[name] for name in names if name in inputs}
    inputs = moved(inputs, dtype) | scalars
    alone = moved(run_alone(model, inputs), torch.float32)
    plan = plan_of(model)

    def error_of(tried: ModelPlan) -> float:
        handle = parallelize(model, tried, group=group)
        try:
            return relative_error(moved(run_parallel(model, handle, inputs), torch.float32), alone)
        finally:
            handle.remove()

    parallel = error_of(plan)
    try:
        broken = error_of(without_exchange(plan))
    except RuntimeError:  # a whole mask does not fit one rank's tokens
        broken = math.inf
    return CaseErrors(parallel, relative_error(alone, exact), broken)


def world_group() -> dist.ProcessGroup:
    """Return the group of all ranks."""
    group = dist.group.WORLD
    assert group is not None
    return group


def sequence_group(dims: ParallelDims) -> SequenceGroup:
    """Return the groups of this rank's sequence; collective over all ranks."""
    group = build_mesh(dims).sequence_group
    assert group is not None
    return group


def world_sequence() -> SequenceGroup:
    """Return Ulysses over all ranks."""
    return SequenceGroup(world_group(), ring=None, ulysses=world_group())


def forward_of(model: nn.Module) -> Any:
    """Return the forward that the adapter calls: ComfyUI's inner one, else the module's own."""
    return getattr(model, "_forward", model)


def copied(value: Any) -> Any:
    """Return a copy of nested inputs that shares no tensor; functions are kept."""
    return moved(value, None)


def moved(value: Any, target: torch.device | torch.dtype | None) -> Any:
    """Return a copy of nested inputs on a device or in a dtype (floating tensors only)."""
    if isinstance(value, torch.Tensor):
        skip = isinstance(target, torch.dtype) and not value.is_floating_point()
        return value.clone() if target is None or skip else value.to(target, copy=True)
    if isinstance(value, dict):
        return {key: moved(item, target) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(moved(item, target) for item in value)
    return copy.copy(value)


def same(one: Any, other: Any) -> bool:
    """Return whether nested inputs are equal, tensors bit for bit."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other
