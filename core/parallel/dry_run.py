"""Count what one evaluation of a denoiser costs, by running it on the meta device: nothing is computed.

The model's own code says which products it makes and which attention it calls, so no formula for each
family is needed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from ..module_paths import find_modules, has_modules
from .attention.local import AttentionFunction, parse_call
from .cost_model import AttentionWork, DenoiserWork
from .plan import ModelPlan
from .tensor_plan import RowParallel
from .tensor_shards import largest_rank_bytes


def count_work(
    model: nn.Module, plan: ModelPlan, call: Callable[[AttentionFunction], Any], *, conditionings: int = 1
) -> DenoiserWork:
    """Return the work of ``call``.

    Args:
        model: All its parameters and buffers on the meta device, in the dtypes of the real one.
        plan: Its plan.
        call: Evaluates the model once on meta tensors, of the shapes and dtypes that will be sampled, with
            the given attention override.
        conditionings: Evaluations a step.

    Returns:
        The counts; ``activation_bytes`` is an upper estimate: the widest feed-forward of all tokens.

    Raises:
        NotImplementedError, RuntimeError: If the model's code reads values and cannot run without them.
    """
    attention, reductions = _AttentionRecorder(), _Reductions()
    handles = [module.register_forward_hook(reductions.add) for module in _row_parallel(model, plan)]
    counter, operations = FlopCounterMode(display=False), _Operations()
    try:
        with operations, counter, torch.no_grad():
            call(attention.override)
    finally:
        for handle in handles:
            handle.remove()
    whole = largest_rank_bytes(model, plan, 1)
    cut = 0 if plan.tensor is None else 2 * (whole - largest_rank_bytes(model, plan, 2))
    return DenoiserWork(
        linear_flops=float(counter.get_total_flops()),
        attention=attention.work(),
        weight_bytes=whole,
        cut_weight_bytes=cut,
        reduced_elements=reductions.elements,
        reductions=reductions.calls,
        operations=operations.count,
        element_bytes=attention.element_bytes,
        conditionings=conditionings,
        activation_bytes=attention.activation_bytes(),
    )


class _AttentionRecorder:
    """Stands in for attention: notes the shapes and returns an output of the right one."""

    # Live at the peak of a block, in tensors of the stream's width: residual, its norm, query, key and
    # value, attention's output, and the four times wider feed-forward twice (before and after its
    # activation function).
    _LIVE_TENSORS = 14

    def __init__(self) -> None:
        self.calls: Counter[AttentionWork] = Counter()
        self.element_bytes = 2

    def override(
        self,
        function: AttentionFunction,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        heads: int,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Take the place of ``function(q, k, v, heads, *args, **kwargs)``."""
        call = parse_call(function, (q, k, v), heads, args, kwargs)
        batch, _, queries, head_channels = call.q.shape
        keys = call.k.shape[2]
        # Self-attention by shape: text of exactly the sequence's length would be counted as exchanged.
        self.calls[
            AttentionWork(queries, keys, heads, head_channels, batch, over_sequence=queries == keys)
        ] += 1
        self.element_bytes = call.q.element_size()
        return call.as_asked(call.q.new_empty(batch, queries, heads * call.v.shape[3]))

    def work(self) -> tuple[AttentionWork, ...]:
        """Return the calls, equal ones together."""
        return tuple(replace(call, count=count) for call, count in self.calls.items())

    def activation_bytes(self) -> int:
        """Return the estimate for all tokens."""
        widest = max((call.batch * call.queries * call.channels for call in self.calls), default=0)
        return self._LIVE_TENSORS * widest * self.element_bytes


class _Operations(TorchDispatchMode):
    """Counts the operations that compute: one kernel each, at least."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count ``func`` unless it only looks at memory in another way."""
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


class _Reductions:
    """Counts the outputs of row-parallel layers."""

    def __init__(self) -> None:
        self.elements = 0
        self.calls = 0

    def add(self, module: nn.Module, args: tuple, output: torch.Tensor) -> None:
        """Count one output; a forward hook."""
        self.elements += output.numel()
        self.calls += 1


def _row_parallel(model: nn.Module, plan: ModelPlan) -> list[nn.Module]:
    rules = plan.tensor.rules if plan.tensor is not None else ()
    paths = [rule.path for rule in rules if isinstance(rule, RowParallel) and has_modules(model, rule.path)]
    return list({id(module): module for path in paths for _, module in find_modules(model, path)}.values())
