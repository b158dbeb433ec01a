"""Run a model by a ``_cp_plan`` dictionary of diffusers, as it is, on this package's attention.

Such a dictionary says which arguments and outputs of which modules are split over ranks and which outputs
are gathered. It does not say what an attention call is over; so while the model runs, its calls of
``scaled_dot_product_attention`` are caught, and the ranks tell each other how many queries and keys they
have. Keys that every rank has whole are then met once for each rank, which softmax does not change.

What differs from diffusers: lengths and heads need not divide by the ranks, masks of keys are exact, Ring
and Ulysses x Ring work with them, nothing of the model is replaced, and the plan's own rule is kept that a
tensor of another number of dims than the plan expects stays whole.

What is refused: a tensor with fewer rows than ranks, causal attention, masks with a row for each query.
Attention must go through ``scaled_dot_product_attention`` (diffusers' native backend).

Source of the dictionary's meaning: diffusers ``models/_modeling_parallel.py``, ``hooks/context_parallel.py``.

Shapes: ``B`` batch, ``H`` heads, ``Q`` queries and ``K`` keys of this rank, ``D`` head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ..errors import PlanError
from ..module_hooks import Forward, ModuleHook, hook_names, install_hook, remove_hook
from ..module_paths import find_modules
from .arguments import find_slot, signature_of
from .attention.local import AttentionCall
from .attention.unified import sequence_attention
from .collectives import all_gather
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
        for full_path, module in find_modules(model, path):
            if id(module) not in hooks:
                hooks[id(module)] = CpPlanHook(full_path or type(model).__name__, handle)
                handle.modules.append(module)
            hooks[id(module)].add(entry, module)
    for module in handle.modules:
        if _HOOK in hook_names(module):
            raise PlanError(f"{type(model).__name__} is parallel already; call remove() first")
    for module in handle.modules:
        install_hook(module, _HOOK, hooks[id(module)])
    return handle


class CpPlanHandle:
    """A model that ``parallelize_cp_plan`` prepared.

    Args:
        group: The ranks that share one sequence.

    Attributes:
        running: Whether a forward runs through ``run``.
        split_open: Whether something is split in it and nothing was gathered since.
    """

    def __init__(self, group: SequenceGroup) -> None:
        self.group = group
        self.modules: list[nn.Module] = []
        self.rank = dist.get_rank(group.whole)
        self.num_ranks = dist.get_world_size(group.whole)
        self.running = False
        self.split_open = False
        self._lengths: list[int] = []
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
        self.running, self.split_open, self._lengths, self._num_exchanges = True, False, [], 0
        try:
            with _CaughtAttention(self):
                return forward(*args, **kwargs)
        finally:
            self.running = False

    def remove(self) -> None:
        """Take every hook off again; the model is as it was, bit for bit."""
        for module in self.modules:
            remove_hook(module, _HOOK)
        self.modules = []

    def split(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Return this rank's part of a whole tensor.

        Raises:
            PlanError: If there are fewer rows than ranks.
        """
        length = tensor.shape[dim]
        if length < self.num_ranks:
            raise PlanError(f"{length} rows cannot be split over {self.num_ranks} ranks by a _cp_plan")
        self._lengths.append(length)
        self.split_open = True
        parts = tensor.split(split_sizes(length, self.num_ranks), dim)
        return parts[self.rank].clone(memory_format=torch.contiguous_format)

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
        key = (self._num_exchanges, len(mine), tuple(self._lengths))
        self._num_exchanges += 1
        if key not in self._known:
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
    """Splits arguments and outputs of one module, and gathers outputs."""

    def __init__(self, path: str, handle: CpPlanHandle) -> None:
        self.path = path
        self.handle = handle
        self.arguments: list[tuple[str, Any, Any]] = []
        self.outputs: dict[int, Any] = {}
        self.gathers: list[Any] = []

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
        for _, slot, split in self.arguments:
            value = slot.read(args, kwargs)
            local = self._split(value, split)
            if local is not value:
                args, kwargs = slot.replace(args, kwargs, local)
        output = forward(*args, **kwargs)
        if not self.outputs and not self.gathers:
            return output
        values = [output] if isinstance(output, torch.Tensor) else list(output)
        for index, split in self.outputs.items():
            values[index] = self._split(values[index], split)
        for index, gather in enumerate(self.gathers):
            if gather is not None:
                values[index] = self.handle.gather(values[index], gather.gather_dim)
        return values[0] if isinstance(output, torch.Tensor) else type(output)(values)

    def _split(self, value: Any, split: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if split.expected_dims is not None and value.ndim != split.expected_dims:
            return value
        try:
            return self.handle.split(value, split.split_dim)
        except PlanError as error:
            raise PlanError(f"{self.path}: {error}") from None


class _CaughtAttention(TorchFunctionMode):
    """Sends ``scaled_dot_product_attention`` over what is split through the group."""

    def __init__(self, handle: CpPlanHandle) -> None:
        super().__init__()
        self.handle = handle

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is F.scaled_dot_product_attention and self.handle.split_open:
            return _attend(self.handle, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _attend(
    handle: CpPlanHandle,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Attend to the keys of all ranks; same arguments and result as the function that it stands for.

    Raises:
        PlanError: If the call is causal or has dropout, or its mask is not one of keys.
    """
    if is_causal or dropout_p:
        raise PlanError("causal attention or dropout in a model that runs by a _cp_plan is not supported")
    queries, keys = handle.exchange(query, query.shape[2], key.shape[2])
    options = {"scale": scale, "enable_gqa": enable_gqa}
    group = handle.group.whole
    if attn_mask is not None:
        if attn_mask.shape[-2] != 1 or attn_mask.shape[-1] != key.shape[2]:
            raise PlanError(
                f"a mask of shape {tuple(attn_mask.shape)} is not one of this rank's {key.shape[2]} keys"
            )
        attn_mask = all_gather(attn_mask.movedim(-1, 0), keys, group=group).movedim(0, -1)
    if queries == keys and query.shape[1] == key.shape[1]:
        call = AttentionCall(_plain_backend, query, key, value, None, True, options)
        return call.as_asked(
            sequence_attention(call, token_sizes=queries, mask=attn_mask, group=handle.group)
        )
    key, value = (
        all_gather(tensor.movedim(2, 0), keys, group=group).movedim(0, 2) for tensor in (key, value)
    )
    return F.scaled_dot_product_attention(query, key, value, attn_mask=attn_mask, **options)


def _plain_backend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    heads: int,
    *,
    mask: torch.Tensor | None,
    **options: Any,
) -> torch.Tensor:
    del options["skip_reshape"]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **options).transpose(1, 2).flatten(2)
