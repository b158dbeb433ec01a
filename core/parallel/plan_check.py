"""Check a plan against a model, and degrees against both, before anything runs.

Works on meta tensors: only module names, signatures and attributes are read.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import nn

from ..errors import PlanError, RequestError
from ..module_paths import find_modules, has_modules
from .arguments import ArgumentSlot, find_slot, named_slots, signature_of
from .conditions import applies
from .mesh import ParallelDims, input_name
from .plan import (
    AttentionRole,
    ExpandRowsThenShard,
    ExpandThenShard,
    Gather,
    InputAction,
    Local,
    LocalIndex,
    LocalRanges,
    LocalSlices,
    ModelPlan,
    ModuleRule,
    ParallelMethod,
    SelfAttention,
    Shard,
    ShardedKeysAttention,
    Split,
    Truncate,
    roles_of,
)
from .tensor_shards import TensorShards


@dataclass
class ModuleActions:
    """All that a plan does at one module, its arguments found.

    Args:
        path: Full path of the module, for messages.
        module: The module.
        options: Where the module gets ``transformer_options``, if it does.
    """

    path: str
    module: nn.Module
    inputs: list[tuple[InputAction, ArgumentSlot]] = field(default_factory=list)
    attention: tuple[AttentionRole, ...] = ()
    options: ArgumentSlot | None = None
    gather: Gather | None = None


def check_plan(model: nn.Module, plan: ModelPlan) -> list[ModuleActions]:
    """Resolve every path and argument name of ``plan`` on ``model``.

    Args:
        model: The model, possibly on the meta device.
        plan: Its plan.

    Returns:
        One entry for each module at which something happens, in the order of the rules.

    Raises:
        PlanError: If the class is another one, a path or argument does not exist, an argument of a
            module is not accounted for, or a stream is used but not opened or not closed.
    """
    class_path = f"{type(model).__module__}.{type(model).__qualname__}"
    if class_path != plan.class_path:
        raise PlanError(f"the plan {plan.name!r} is for {plan.class_path}, but the model is {class_path}")
    head_count(plan, model)
    _check_streams(plan)
    found: dict[str, ModuleActions] = {}
    for rule in plan.rules:
        if rule.optional and not has_modules(model, rule.path):
            continue
        for path, module in find_modules(model, rule.path):
            if applies(rule, module, model):
                _add_rule(found.setdefault(path, ModuleActions(path, module)), rule)
    for path, actions in found.items():
        _check_every_argument(plan, path, actions)
    return list(found.values())


def head_count(plan: ModelPlan, model: nn.Module) -> int:
    """Return the model's number of attention heads, the fewest if its modules differ.

    Raises:
        PlanError: If the plan's path to it does not resolve.
    """
    path, _, attribute = plan.heads.rpartition(".")
    counts = [getattr(module, attribute, None) for _, module in find_modules(model, path)]
    numbers = [count for count in counts if isinstance(count, int)]
    if len(numbers) < len(counts):
        raise PlanError(
            f"the plan {plan.name!r}: {plan.heads!r} is no number of heads in {type(model).__name__}"
        )
    return min(numbers)


def validate_model(plan: ModelPlan, model: nn.Module, dims: ParallelDims) -> None:
    """Check that ``model`` can run with these degrees.

    A Ulysses degree above the number of heads is refused: some ranks would compute no attention
    and slow the others down. (The engine itself is exact with such ranks.)

    Raises:
        RequestError: If a method is not proven for the model, or a degree does not fit it.
        PlanError: If the plan does not fit this version of the class.
    """
    check_plan(model, plan)
    for method in ParallelMethod:
        degree = dims.degrees[method]
        if degree > 1 and method not in plan.methods:
            raise RequestError(
                f"{input_name(method)}={degree} was asked for {plan.name}",
                limit=f"{plan.name} runs with {', '.join(sorted(plan.methods))} only",
                way_out=f"Set {input_name(method)} to 1",
            )
    heads = fewest = head_count(plan, model)
    if dims.tp > 1:
        # Ulysses deals out what heads a rank has; the last has the fewest.
        last = dims.tp - 1
        fewest = TensorShards(model, plan, degree=dims.tp, rank=last).units.local_heads(heads, last)
    _check_ulysses(plan, dims, heads, fewest)


def _check_ulysses(plan: ModelPlan, dims: ParallelDims, heads: int, fewest: int) -> None:
    if dims.ulysses > fewest:
        per_rank = f", or {fewest} with {input_name('tp')}={dims.tp}" if dims.tp > 1 else ""
        raise RequestError(
            f"ulysses_degree={dims.ulysses} was asked for {plan.name}",
            limit=f"Ulysses gives each rank whole attention heads, and this model has {heads}{per_rank}",
            way_out=f"Set ulysses_degree to a number from 1 to {fewest}",
        )


def _check_streams(plan: ModelPlan) -> None:
    opened = {action.stream for action in _inputs(plan) if isinstance(action, Split)}
    closed: set[str] = set()
    used: set[str] = {plan.control.stream} if plan.control else set()
    for action in _inputs(plan):
        used.update(_streams_of(action))
    for rule in plan.rules:
        for role in roles_of(rule.attention):
            used.update(role.streams if isinstance(role, SelfAttention | ShardedKeysAttention) else ())
        if rule.gather is not None:
            closed.update(rule.gather.streams, rule.gather.discard)
    for streams, problem in (
        (used - opened, "are used but never opened by a Split"),
        (closed - opened, "are gathered but never opened by a Split"),
        (opened - closed, "are opened but never closed by a Gather"),
    ):
        if streams:
            raise PlanError(f"the plan {plan.name!r}: streams {sorted(streams)} {problem}")


def _inputs(plan: ModelPlan) -> Iterable[InputAction]:
    return (action for rule in plan.rules for action in rule.inputs)


def _streams_of(action: InputAction) -> tuple[str, ...]:
    if isinstance(action, Local | Shard | Truncate):
        return action.streams
    if isinstance(action, LocalSlices):
        return (action.stream,) if action.after is None else (action.stream, action.after)
    if isinstance(action, Split | ExpandThenShard | ExpandRowsThenShard | LocalIndex | LocalRanges):
        return (action.stream,)
    return ()


def _add_rule(actions: ModuleActions, rule: ModuleRule) -> None:
    signature = signature_of(actions.module)
    slots = named_slots(signature)
    for action in rule.inputs:
        slot = find_slot(signature, action.argument)
        if slot is not None:
            actions.inputs.append((action, slot))
        elif not action.optional:
            raise PlanError(
                f"the rule {rule.path!r} names the argument {action.argument!r}, but "
                f"{type(actions.module).__name__}.forward has {sorted(slots)}"
            )
    actions.attention = roles_of(rule.attention) or actions.attention
    actions.options = slots.get("transformer_options")
    actions.gather = rule.gather or actions.gather


def _check_every_argument(plan: ModelPlan, path: str, actions: ModuleActions) -> None:
    if not actions.inputs:
        return
    named = {slot.name for _, slot in actions.inputs}
    # What comes by *args and **kwargs is seen in the call only (``check_call``).
    missing = [name for name in named_slots(signature_of(actions.module)) if name not in named]
    if missing:
        raise PlanError(
            f"the plan {plan.name!r} does not say what happens to {missing} of {path} "
            f"({type(actions.module).__name__}.forward). A tensor over tokens left whole there would give "
            "wrong results without an error, so this version of the model is refused. Add them to the plan."
        )
