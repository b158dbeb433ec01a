"""Run a plan: one small operator for each word of ``plan``, applied by hooks around modules.

Shapes: ``B`` batch, ``S`` tokens of the whole sequence, ``C`` channels; a rank's tensors have the
``carried`` rows of ``sequence``: its tokens, or one phantom.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..errors import PlanError
from ..module_hooks import Forward, ModuleHook
from .collectives import all_gather
from .forward_state import ForwardState
from .plan import (
    Absent,
    ExpandRowsThenShard,
    ExpandThenShard,
    Gather,
    InputAction,
    Local,
    LocalIndex,
    LocalRanges,
    LocalSlices,
    Replicated,
    Shard,
    Split,
    Truncate,
)
from .plan_check import ModuleActions
from .sequence import Stream, check_carried, drop_phantoms, joint_sizes, take, to_canonical


class ContextParallelHook(ModuleHook):
    """Does what a plan says at one module.

    Args:
        actions: What to do.
        current: Returns the state of the running forward, or None if the model runs by itself.
    """

    def __init__(self, actions: ModuleActions, current: Callable[[], ForwardState | None]) -> None:
        self.actions = actions
        self.current = current
        # Forms of calls that were checked, if the form is all that there is to check.
        self._known_forms: set[tuple] = set()
        self._form_is_all = all(slot.item is None for _, slot in actions.inputs)

    def run(self, forward: Forward, module: nn.Module, args: tuple, kwargs: dict) -> Any:
        """Rewrite the arguments, run the module under its role, rewrite the output."""
        state = self.current()
        if state is None:
            return forward(*args, **kwargs)
        self._check_call(args, kwargs)
        for action, slot in self.actions.inputs:
            value = slot.read(args, kwargs)
            if value is None:
                continue
            try:
                local = localize(action, value, state)
            except PlanError as error:
                raise PlanError(f"{self.actions.path}, argument {action.argument!r}: {error}") from None
            if local is not value:
                args, kwargs = slot.replace(args, kwargs, local)
        if self.actions.attention:
            options = self.actions.options.read(args, kwargs) if self.actions.options else None
            with state.attention_roles(self.actions.attention, self.actions.path, options):
                output = forward(*args, **kwargs)
        else:
            output = forward(*args, **kwargs)
        return output if self.actions.gather is None else gather(self.actions.gather, output, state)

    def _check_call(self, args: tuple, kwargs: dict) -> None:
        """Check that the plan knows all that is passed: a forward may take ``*args`` and ``**kwargs``.

        Raises:
            PlanError: Otherwise; what is unknown could be a tensor over tokens left whole.
        """
        form = (len(args), *kwargs)
        if not self.actions.inputs or form in self._known_forms:
            return
        slots = [slot for _, slot in self.actions.inputs]
        unknown = [f"args[{i}]" for i in range(len(args)) if i not in {slot.position for slot in slots}]
        unknown += sorted(kwargs.keys() - {slot.name for slot in slots})
        for slot in {dataclasses.replace(slot, item=None) for slot in slots if slot.item is not None}:
            named = {other.item for other in slots if other.name == slot.name}
            unknown += [
                f"{slot.name}[{item}]"
                for item in range(len(slot.read(args, kwargs) or ()))
                if item not in named
            ]
        if unknown:
            raise PlanError(f"{self.actions.path} was called with {unknown}, which the plan does not name")
        if self._form_is_all:
            self._known_forms.add(form)


def gather(action: Gather, output: Any, state: ForwardState) -> Any:
    """Return whole streams ``[B, S, C]`` from each rank's ``[B, carried, C]``, and close the region."""
    if action.item is not None:
        items = list(output)
        items[action.item] = gather(dataclasses.replace(action, item=None), items[action.item], state)
        return tuple(items)
    streams = state.streams(action.streams)
    local = drop_phantoms(output, streams, action.dim)
    whole = all_gather(local.movedim(action.dim, 0), joint_sizes(streams), group=state.group.whole)
    state.close(action.streams + action.discard)
    return to_canonical(whole, streams, 0).movedim(0, action.dim).contiguous()


@functools.singledispatch
def localize(action: InputAction, value: Any, state: ForwardState) -> Any:
    """Return what this rank gets instead of ``value``; one implementation for each word of a plan.

    Raises:
        PlanError: If the value does not fit the streams.
    """
    raise NotImplementedError(type(action).__name__)


@localize.register
def _(action: Split, value: Any, state: ForwardState) -> torch.Tensor:
    tensor = _tensor(value)
    return take(tensor, (state.open(action.stream, tensor.shape[action.dim]),), action.dim)


@localize.register
def _(action: Local, value: Any, state: ForwardState) -> torch.Tensor:
    tensor = _tensor(value)
    check_carried(tensor, state.streams(action.streams), action.dim)
    return tensor


@localize.register
def _(action: Replicated, value: Any, state: ForwardState) -> Any:
    return value


@localize.register
def _(action: Absent, value: Any, state: ForwardState) -> Any:
    raise PlanError("it is not supported in parallel, and it was given")


@localize.register
def _(action: Shard, value: Any, state: ForwardState) -> torch.Tensor:
    tensor = _tensor(value)
    streams = state.streams(action.streams)
    key = (streams, action.dim)
    return state.shard_once(key, tensor, lambda: take(tensor, streams, action.dim))


@localize.register
def _(action: ExpandThenShard, value: Any, state: ForwardState) -> torch.Tensor:
    tensor = _tensor(value)
    num_rows = tensor.shape[action.dim]
    if num_rows == 1:
        return tensor
    (stream,) = state.streams((action.stream,))
    run = -(-stream.length // num_rows)
    if num_rows < stream.length < 2 * num_rows:
        raise PlanError(f"{num_rows} rows cannot be spread over the {stream.length} tokens of {stream.name}")

    def expand() -> torch.Tensor:
        # A phantom takes the last row: any value does, it is dropped before it is used.
        first = min(stream.start, stream.length - 1)
        tokens = torch.arange(first, first + stream.carried_length, device=tensor.device)
        return tensor.index_select(action.dim, tokens // run)

    return state.shard_once((stream, action.dim, "expanded"), tensor, expand)


@localize.register
def _(action: ExpandRowsThenShard, value: Any, state: ForwardState) -> Any:
    def expand() -> Any:
        rows = getattr(value, action.rows)
        local = localize(ExpandThenShard(action.argument, action.stream), rows, state)
        changes = {action.rows: local, action.run_length: 1, action.num_rows: local.shape[1]}
        copied = copy.copy(value)
        for name, changed in changes.items():
            setattr(copied, name, changed)
        return copied

    return state.shard_once((action.stream, "rows"), value, expand)


@localize.register
def _(action: LocalIndex, value: Any, state: ForwardState) -> int:
    (stream,) = state.streams((action.stream,))
    if not isinstance(value, int) or not 0 <= value <= stream.length:
        raise PlanError(f"{value!r} is no index into the {stream.length} tokens of {stream.name}")
    return _clamp(value, stream)


@localize.register
def _(action: LocalSlices, value: Any, state: ForwardState) -> list[tuple[int, int, Any]]:
    (stream,) = state.streams((action.stream,))
    before = 0 if action.after is None else state.streams((action.after,))[0].carried_length
    local: list[tuple[int, int, Any]] = []
    for start, stop, row in value:
        stop = before + stream.length if stop is None else stop
        if not 0 <= start <= stop <= before + stream.length:
            raise PlanError(f"the slice {start}:{stop} is not in the {stream.length} tokens of {stream.name}")
        first = 0 if start == 0 else before + _clamp(start - before, stream)
        last = before + _clamp(stop - before, stream)
        if last > first:
            local.append((first, last, row))
    return local


@localize.register
def _(action: LocalRanges, value: Any, state: ForwardState) -> list[tuple[int, int]]:
    (stream,) = state.streams((action.stream,))
    bad = [(start, stop) for start, stop in value if not 0 <= start <= stop <= stream.length]
    if bad:
        raise PlanError(f"the ranges {bad} are not in the {stream.length} tokens of {stream.name}")
    local = [(_clamp(start, stream), _clamp(stop, stream)) for start, stop in value]
    return [(first, last) for first, last in local if last > first]


@localize.register
def _(action: Truncate, value: Any, state: ForwardState) -> torch.Tensor:
    tensor, length = _tensor(value), sum(s.carried_length for s in state.streams(action.streams))
    if tensor.shape[action.dim] < length:
        raise PlanError(f"{tensor.shape[action.dim]} tokens are fewer than this rank's {length}")
    return tensor.narrow(action.dim, 0, length)


def _clamp(index: int, stream: Stream) -> int:
    """Return a global cut position as a position on this rank."""
    return min(max(index, stream.start), stream.stop) - stream.start


def _tensor(value: Any) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise PlanError(f"the plan expects a tensor, got {type(value).__name__}")
    return value
