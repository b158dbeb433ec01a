"""Make one rank's copy of a model compute its part: the entry point of this package.

Everything here is local to the rank; ranks meet in the collectives only.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..errors import PlanError
from ..module_hooks import hook_names, install_hook, remove_hook
from .arguments import slot_of
from .attention.local import AttentionFunction
from .collectives import all_reduce
from .conditions import has
from .context_parallel import ContextParallelHook
from .forward_state import ForwardState
from .mesh import SequenceGroup
from .plan import ModelPlan
from .plan_check import check_plan
from .refused_inputs import refuse_inputs
from .tensor_parallel import TensorParallelHandle, refuse_tensor_parallel
from .tensor_shards import TensorShards

_HOOK = "context_parallel"
_OPTIONS = "transformer_options"


def parallelize(
    model: nn.Module,
    plan: ModelPlan,
    *,
    group: SequenceGroup | dist.ProcessGroup | None = None,
    tensor_group: dist.ProcessGroup | None = None,
) -> ParallelHandle:
    """Install ``plan`` on this rank's ``model``; no communication happens yet.

    Args:
        model: The rank's copy, with the same weights on every rank.
        plan: The plan of the model's class.
        group: The ranks that share one sequence, from ``build_mesh``; a plain process group stands for
            Ulysses over all its ranks. None if this rank computes the whole sequence.
        tensor_group: The ranks that share the weights, or None if this rank keeps them whole. The model
            must hold them whole; it gets its part of them, and the whole ones back by ``remove``.

    Returns:
        The handle to run and to remove it. Without it the model runs as before.

    Raises:
        RequestError: If the model has fewer heads (or other units) than the tensor group has ranks.
        PlanError: If the plan does not fit the model, or the model is parallel already.
    """
    tensor = None
    refuse_tensor_parallel(model)
    if tensor_group is not None:
        degree, rank = dist.get_world_size(tensor_group), dist.get_rank(tensor_group)
        tensor = TensorParallelHandle(TensorShards(model, plan, degree=degree, rank=rank), tensor_group)
    handle = install_parallel(model, plan, group=group, tensor=tensor)
    if tensor is not None:
        tensor.cut_weights()
    return handle


def install_parallel(
    model: nn.Module,
    plan: ModelPlan,
    *,
    group: SequenceGroup | dist.ProcessGroup | None,
    tensor: TensorParallelHandle | None,
) -> ParallelHandle:
    """Do what ``parallelize`` does, except for the weights: the caller gives the model its part of them.

    Raises:
        PlanError: If the plan does not fit the model, or the model is parallel already.
    """
    handle = _install_sequence(model, plan, group)
    if tensor is not None:
        tensor.install()
        handle.tensor = tensor
    return handle


def _install_sequence(
    model: nn.Module, plan: ModelPlan, group: SequenceGroup | dist.ProcessGroup | None
) -> ParallelHandle:
    if group is None:
        return ParallelHandle(plan, None)
    actions = check_plan(model, plan)
    for action in actions:
        if _HOOK in hook_names(action.module):
            raise PlanError(
                f"{action.path} of {type(model).__name__} is parallel already; call remove() first"
            )
    if not isinstance(group, SequenceGroup):
        group = SequenceGroup(group, ring=None, ulysses=group)
    handle = ParallelHandle(plan, group)
    for action in actions:
        install_hook(action.module, _HOOK, ContextParallelHook(action, handle.current))
    handle.check_inputs = functools.partial(refuse_inputs, plan, model)
    if plan.control is not None and not has(plan.control.run_into_having, model, model):
        handle.control = replace(plan.control, run_into=())
    handle.modules = [action.module for action in actions]
    return handle


class ParallelHandle:
    """A model that ``parallelize`` prepared.

    Args:
        plan: Its plan.
        group: The ranks that share one sequence, or None if each computes all of it.
    """

    def __init__(self, plan: ModelPlan, group: SequenceGroup | None) -> None:
        self.plan = plan
        self.group = group
        self.tensor: TensorParallelHandle | None = None
        self.modules: list[nn.Module] = []
        self.control = plan.control
        self.check_inputs: Callable[[Collection[str]], None] = lambda names: None
        self._state: ForwardState | None = None

    def run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``forward(*args, **kwargs)`` of the model in parallel; all ranks of the group must call.

        Args:
            forward: The model, or its bound forward.
            *args: The whole inputs, the same on every rank.
            **kwargs: Likewise; the model must get ``attention_override`` with them.

        Returns:
            The whole output, on every rank.

        Raises:
            RequestError: If an input is one that the plan refuses; nothing was computed.
            PlanError: If the inputs or the model do not do what the plan says. The other ranks may
                be left waiting in a collective, so the caller must end or restart them.
        """
        if self._state is not None:
            raise PlanError("a parallel model was called again before its forward returned")
        called = forward.forward if isinstance(forward, nn.Module) else forward
        signature = inspect.signature(called)
        options = slot_of(signature, _OPTIONS).read(args, kwargs)
        _refuse_patches(options or {}, self.plan)
        if self.group is None:
            return forward(*args, **kwargs)
        names = {refused.argument for refused in self.plan.refused}
        self.check_inputs({
            name for name in names if slot_of(signature, name).read(args, kwargs) is not None
        })  # fmt: skip
        state = ForwardState(self.group)
        if self.control is not None:
            slot = slot_of(signature, self.control.argument)
            control = slot.read(args, kwargs)
            if control is not None:
                args, kwargs = slot.replace(args, kwargs, state.defer_control(self.control, control))
        self._state = state
        try:
            output = forward(*args, **kwargs)
            state.check_closed()
            return output
        finally:
            self._state = None

    def agree(self, well: bool, *, device: torch.device) -> bool:
        """Return whether all ranks that share this model say ``well``; all of them must call.

        Args:
            well: What this rank says.
            device: Where it computes.
        """
        failures = torch.tensor([0.0 if well else 1.0], device=device)
        groups = (self.group and self.group.whole, self.tensor and self.tensor.group)
        for group in groups:
            if group is not None:
                failures = all_reduce(failures, group=group)
        return float(failures) == 0.0

    def attention_override(
        self,
        function: AttentionFunction,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        heads: int,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Run one attention call of the model; give it to the model as its attention override.

        Args:
            function: The attention function that the model would have called.
            q: ``[B, H, S, D]`` or ``[B, S, H * D]``; see ``attention.local``.
            k: Likewise.
            v: Likewise.
            heads: ``H``.
            *args: More arguments of ``function``.
            **kwargs: More arguments of ``function``.

        Returns:
            What ``function`` returns for the whole sequence, this rank's tokens of it. Outside of any
            role, and while no forward runs through ``run``, the result of ``function`` itself.
        """
        if self._state is None:
            return function(q, k, v, heads, *args, **kwargs)
        return self._state.attend(function, (q, k, v), heads, args, kwargs)

    def current(self) -> ForwardState | None:
        """Return the state of the running forward, or None."""
        return self._state

    def remove(self) -> None:
        """Take every hook off again; the model is as it was, bit for bit."""
        for module in self.modules:
            remove_hook(module, _HOOK)
        self.modules = []
        self.check_inputs = lambda names: None
        if self.tensor is not None:
            self.tensor.remove()
        self.tensor = None


def _refuse_patches(options: dict[str, Any], plan: ModelPlan) -> None:
    """Refuse functions that the model would call on one rank's part of the tokens.

    Raises:
        PlanError: Naming them.
    """
    called = {name for name, patches in (options.get("patches") or {}).items() if patches}
    names = sorted(called - plan.whole_sequence_patches)
    names += [
        f"patches_replace {name}"
        for name, patches in (options.get("patches_replace") or {}).items()
        if patches
    ]
    if names:
        raise PlanError(
            f"block patches {names} were given to {plan.name}. Inside a parallel model they would see one "
            "rank's tokens only. Remove the node that adds them, or sample with a stock KSampler."
        )
