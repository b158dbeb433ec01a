"""Run a model by a ``_cp_plan`` dictionary of diffusers, as it is, on this package's attention.

Such a dictionary says which arguments and outputs of which modules are split over ranks and which outputs
are gathered. It does not say what an attention call is over; so while the model runs, its calls of
``scaled_dot_product_attention`` are caught (``cp_attention``).

What differs from diffusers: lengths and heads need not divide by the ranks, masks of keys are exact, Ring
and Ulysses x Ring work with them, nothing of the model is replaced, and the plan's own rule is kept that a
tensor of another number of dims than the plan expects stays whole. A rank may have no rows. Positions that a
dictionary leaves out are split like their twins, ControlNet residuals like the image tokens; what it has too
much, for the blocks of a larger model, is ignored.

Refused are causal attention, masks with a row for each query, joint sequences of which a part is whole on
every rank, and modules inside the model that compute with a whole number of tokens beside their part. Calls
of attention must be ``scaled_dot_product_attention`` (diffusers' native backend).

Source of what it means: diffusers ``models/_modeling_parallel.py``, ``hooks/context_parallel.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..errors import PlanError
from ..module_hooks import Forward, ModuleHook, hook_names, install_hook, remove_hook
from ..module_paths import find_modules, has_modules
from .arguments import find_slot, signature_of
from .collectives import all_gather
from .cp_attention import CaughtAttention
from .cp_counts import guard_counts, refuse_no_times
from .cp_residuals import split_residuals
from .mesh import SequenceGroup
from .sequence import split_sizes

_HOOK = "cp_plan"


def parallelize_cp_plan(
    model: nn.Module, cp_plan: Mapping[str, Any] | None = None, *, group: SequenceGroup
) -> CpPlanHandle:
    """Install a dictionary on this rank's ``model``; no communication happens yet.

    Args:
        model: The rank's copy, with the same weights on every rank.
        cp_plan: Module path -> ``{argument name or output index: split}``, or a gather (or a list of them,
            one for each output). A split is any object with ``split_dim``, ``expected_dims`` and
            ``split_output``; a gather, one with ``gather_dim``. None is the model's own ``_cp_plan``.
        group: The ranks that share one sequence, from ``build_mesh``.

    Raises:
        PlanError: If the model has no such dictionary, a path or argument does not exist, or the model is
            parallel already.
    """
    plan = getattr(model, "_cp_plan", None) if cp_plan is None else cp_plan
    if not plan:
        raise PlanError(f"{type(model).__name__} has no _cp_plan; give one as cp_plan")
    handle = CpPlanHandle(group)
    hooks: dict[int, CpPlanHook] = {}
    for path, entry in plan.items():
        for full_path, module in () if _is_beyond(model, path) else find_modules(model, path):
            if id(module) not in hooks:
                hooks[id(module)] = CpPlanHook(full_path, type(model).__name__, handle)
                handle.modules.append(module)
            hooks[id(module)].add(entry, module)
    _add_twins(model, handle, hooks)
    for module in handle.modules:
        if _HOOK in hook_names(module):
            raise PlanError(f"{type(model).__name__} is parallel already; call remove() first")
    for module in handle.modules:
        install_hook(module, _HOOK, hooks[id(module)])
    handle.hooks = list(hooks.values())
    return handle


def _is_beyond(model: nn.Module, path: str) -> bool:
    """Return whether a path counts further than a list of the model: a dictionary written for more blocks."""
    parts = path.split(".")
    for index, part in enumerate(parts):
        if part.isdigit() and has_modules(model, ".".join(parts[:index])):
            lists = [module for _, module in find_modules(model, ".".join(parts[:index]))]
            if any(isinstance(each, nn.ModuleList) and int(part) >= len(each) for each in lists):
                return True
    return False


def _add_twins(model: nn.Module, handle: CpPlanHandle, hooks: dict[int, CpPlanHook]) -> None:
    """Let tables of positions that the dictionary leaves out be split like those that it names.

    A twin has no weights, is of the same class, and says the same in words (its modality, say); it is split
    where its output has as many rows as that of the table which is named.
    """
    named = [(module, hooks[id(module)]) for module in handle.modules if hooks[id(module)].outputs]
    for path, module in model.named_modules():
        for other, hook in named if id(module) not in hooks else ():
            if (
                type(module) is type(other)
                and not list(module.parameters())
                and _words(module) == _words(other)
            ):
                twin = CpPlanHook(path, type(model).__name__, handle)
                twin.outputs, twin.twin_of = hook.outputs, hook
                hooks[id(module)] = twin
                handle.modules.append(module)
                break


def _words(module: nn.Module) -> dict[str, str]:
    return {name: value for name, value in vars(module).items() if isinstance(value, str)}


class CpPlanHandle:
    """A model that ``parallelize_cp_plan`` prepared.

    Args:
        group: The ranks that share one sequence.

    Attributes:
        running: Whether a forward runs through ``run``.
        split_open: Whether something is split in it and nothing was gathered since.
        lengths: Rows of everything that was split in it, whole.
        is_new: Whether the numbers of the last exchange were not known before.
    """

    def __init__(self, group: SequenceGroup) -> None:
        self.group = group
        self.modules: list[nn.Module] = []
        self.hooks: list[CpPlanHook] = []
        self.rank, self.num_ranks = dist.get_rank(group.whole), dist.get_world_size(group.whole)
        self.running = False
        self.split_open = False
        self.lengths: list[int] = []
        self.is_new = False
        self._num_exchanges = 0
        self._known: dict[tuple, list[tuple[int, ...]]] = {}

    def run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``forward(*args, **kwargs)`` of the model in parallel; all ranks of the group must call.

        Args:
            forward: The model.
            *args: The whole inputs, the same on every rank.
            **kwargs: Likewise.

        Returns:
            The whole output, on every rank.

        Raises:
            PlanError: If the inputs or the model do not fit. The other ranks may be left waiting.
        """
        if self.running:
            raise PlanError("a parallel model was called again before its forward returned")
        self.running, self.split_open, self.lengths, self._num_exchanges = True, False, [], 0
        for hook in self.hooks:
            hook.rows.clear()
        try:
            args, kwargs = split_residuals(forward, args, kwargs, self.part)
            with CaughtAttention(self):
                return forward(*args, **kwargs)
        finally:
            self.running = False

    def remove(self) -> None:
        """Take every hook off again; the model is as it was, bit for bit."""
        for module in self.modules:
            remove_hook(module, _HOOK)
        self.modules = []

    def split(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Return this rank's part of a whole tensor; it may have no rows."""
        self.lengths.append(tensor.shape[dim])
        self.split_open = True
        return self.part(tensor, dim)

    def part(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Return this rank's part of a whole tensor that is split where another one is."""
        parts = tensor.split(split_sizes(tensor.shape[dim], self.num_ranks), dim)
        return parts[self.rank].clone(memory_format=torch.contiguous_format)

    def cut_lengths(self) -> set[int]:
        """Return the lengths that a joint sequence of what was split may have; two streams may be equal."""
        sums = {0}
        for length in set(self.lengths):
            sums |= {done + times * length for done in sums for times in (1, 2)}
        return sums - {0}

    def gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Return the whole tensor from the ranks' parts; collective."""
        (sizes,) = self.exchange(tensor, tensor.shape[dim])
        whole = all_gather(tensor.movedim(dim, 0), sizes, group=self.group.whole)
        self.split_open = False
        return whole.movedim(0, dim).contiguous()

    def exchange(self, like: torch.Tensor, *mine: int) -> list[tuple[int, ...]]:
        """Return for each of this rank's numbers those of all ranks; collective.

        The numbers follow from the whole lengths that were split, which all ranks know. So a forward with
        the same lengths finds them without asking again, on every rank alike.

        Raises:
            PlanError: If the numbers changed although the lengths did not.
        """
        key = (self._num_exchanges, len(mine), tuple(self.lengths))
        self._num_exchanges += 1
        self.is_new = key not in self._known
        if self.is_new:
            row = torch.tensor([mine], dtype=torch.int64, device=like.device)
            rows = all_gather(row, [1] * self.num_ranks, group=self.group.whole).tolist()
            self._known[key] = list(zip(*rows, strict=True))
        known = self._known[key]
        if tuple(numbers[self.rank] for numbers in known) != mine:
            raise PlanError(
                f"this rank has {mine} tokens where it had others in a forward of the same lengths; a model "
                "whose sharding depends on data calls shard() and gather() itself"
            )
        return known


class CpPlanHook(ModuleHook):
    """Splits arguments and outputs of one module, and gathers outputs.

    Args:
        path: Of the module; "" is the model itself.
        model_name: Of the model's class, for messages.
        handle: The running forward.
    """

    def __init__(self, path: str, model_name: str, handle: CpPlanHandle) -> None:
        self.path = path or model_name
        self.is_root = not path
        self.handle = handle
        self.arguments: list[tuple[str, Any, Any]] = []
        self.outputs: dict[int, Any] = {}
        self.gathers: list[Any] = []
        self.twin_of: CpPlanHook | None = None
        # Rows of the outputs that were split last, whole.
        self.rows: dict[int, int] = {}

    def add(self, entry: Any, module: nn.Module) -> None:
        """Take over one entry of the dictionary.

        Raises:
            PlanError: If it is none, or the module has no such argument.
        """
        if not isinstance(entry, Mapping):
            self.gathers = list(entry) if isinstance(entry, list | tuple) else [entry]
            if not all(each is None or hasattr(each, "gather_dim") for each in self.gathers):
                raise PlanError(f"{self.path}: {entry!r} is neither splits nor gathers of a _cp_plan")
            return
        for name, split in entry.items():
            if split.split_output:
                self.outputs[int(name)] = split
                continue
            slot = find_slot(signature_of(module), name)
            if slot is None:
                raise PlanError(f"{self.path} has no argument {name!r}, which the _cp_plan splits")
            self.arguments.append((name, slot, split))

    def run(self, forward: Forward, module: nn.Module, args: tuple, kwargs: dict) -> Any:
        """Split the arguments, call, then split or gather the outputs."""
        if not self.handle.running:
            return forward(*args, **kwargs)
        num_splits = len(self.handle.lengths)
        for name, slot, split in self.arguments:
            value = slot.read(args, kwargs)
            if _is_meant(value, split):
                refuse_no_times(self.path, name, value.shape[split.split_dim], self.handle.num_ranks)
                args, kwargs = slot.replace(args, kwargs, self.handle.split(value, split.split_dim))
        if len(self.handle.lengths) > num_splits and not self.is_root:
            args, kwargs = guard_counts(self.path, signature_of(module), args, kwargs)
        output = forward(*args, **kwargs)
        if not self.outputs and not self.gathers:
            return output
        values = [output] if isinstance(output, torch.Tensor) else list(output)
        for index, split in self.outputs.items():
            if _is_meant(values[index], split) and self._has_rows(
                index, values[index].shape[split.split_dim]
            ):
                values[index] = self.handle.split(values[index], split.split_dim)
        for index, gather in enumerate(self.gathers):
            if gather is not None:
                values[index] = self.handle.gather(values[index], gather.gather_dim)
        return values[0] if isinstance(output, torch.Tensor) else type(output)(values)

    def _has_rows(self, index: int, rows: int) -> bool:
        """Return whether an output of so many rows is split; of a twin, if the other's has as many."""
        if self.twin_of is not None:
            return self.twin_of.rows.get(index) == rows
        self.rows[index] = rows
        return True


def _is_meant(value: Any, split: Any) -> bool:
    if not isinstance(value, torch.Tensor):
        return False
    return split.expected_dims is None or value.ndim == split.expected_dims
