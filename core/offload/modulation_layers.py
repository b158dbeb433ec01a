"""Which layers a modulation cache serves, and when it may.

What this module does not do: it stores nothing.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import peek_interpreter_stack

from ..errors import PlanError, RequestError
from ..module_hooks import hook_names, own_forward
from ..module_paths import find_modules
from .module_dicts import ManagedDict

_MB = 2**20
# Hooks that may run between the cache and a layer's own forward: they change no number.
_NEUTRAL_HOOKS = ("modulation", "offload", "stream")


@dataclass(frozen=True)
class ModulationLayers:
    """Frozen Linear layers whose output depends on one small argument alone.

    Attributes:
        parent: Dotted path, with wildcards as in ``module_paths``, of modules that are called with that
            one argument and decide the Linear's input from nothing else: ``blocks.*.modulation``, which
            is ``Sequential(SiLU(), Linear(...))``, for example.
        linear: Path of the Linear below each of them; empty if it is the Linear itself.
    """

    parent: str
    linear: str = ""


@dataclass(frozen=True)
class ModulationPlan:
    """What a modulation cache shall do.

    Attributes:
        layers: The layers, as data.
        limit_mb: Target memory for stored outputs, in MB (2**20 bytes).
    """

    layers: tuple[ModulationLayers, ...]
    limit_mb: float = 128.0

    def __post_init__(self) -> None:
        """Check the limit.

        Raises:
            RequestError: If it is no size.
        """
        limit = self.limit_mb
        if isinstance(limit, bool) or not isinstance(limit, (int, float)) or not 0 <= limit < math.inf:
            raise RequestError(
                f"limit_mb={limit!r} was asked for the modulation cache",
                limit="It is a size in MB (2**20 bytes), zero or more",
                way_out="Pass a number such as 128",
            )

    @property
    def limit_bytes(self) -> int:
        """The limit in bytes."""
        return int(self.limit_mb * _MB)


class _Identity:
    """Equal for the same living object only; tensors themselves compare by element."""

    def __init__(self, value: Any) -> None:
        self._reference = weakref.ref(value)

    def __eq__(self, other: object) -> bool:
        mine = self._reference()
        return isinstance(other, _Identity) and mine is not None and mine is other._reference()

    __hash__ = None  # pyright: ignore[reportAssignmentType]


class CachedLayer:
    """One Linear with the module whose argument decides its input.

    Args:
        parent: That module, or the Linear itself.
        linear: The Linear.
    """

    def __init__(self, parent: nn.Module, linear: nn.Module) -> None:
        self.parent = parent
        self.linear: Any = linear

    def output_bytes(self, argument: Tensor) -> int:
        """Return the bytes of its output for an argument ``(..., in_features)``."""
        rows = argument.numel() // self.linear.in_features
        return rows * self.linear.out_features * argument.dtype.itemsize

    def may_be_cached(self, tensor: Tensor) -> bool:
        """Return whether an output for this input is a constant: no gradient passes, nothing intervenes."""
        if type(tensor) is not Tensor:
            return False
        if torch.is_grad_enabled():
            own = (parameter for _, parameter in _own_tensors(self.linear))
            if tensor.requires_grad or any(parameter.requires_grad for parameter in own):
                return False
        inner = hook_names(self.linear)
        inner = inner[inner.index("modulation") :]
        return own_forward(self.linear) is None and all(name in _NEUTRAL_HOOKS for name in inner)

    def held(self) -> AbstractContextManager[Any]:
        """Return a context with every tensor of the layer on the target: once read, the scope keeps it."""
        for table in (self.linear._parameters, self.linear._buffers):
            for name in list(table):
                table[name]
        return contextlib.nullcontext()

    def weights_state(self) -> tuple | None:
        """Return something that compares unequal once the layer's weights have changed.

        None if a weight was given other memory that has not been looked at yet.
        """
        state = []
        for name, tensor in _own_tensors(self.linear):
            managed = _managed(self.linear, name)
            if managed is not None:
                if not managed.bucket.is_bound and not managed.is_intact():
                    return None
                state.append((name, _Identity(managed), managed.version()))
            else:
                version = 0 if tensor.is_inference() else tensor._version
                state.append((name, _Identity(tensor), version, tensor.data_ptr()))
        return tuple(state)


def is_observed() -> bool:
    """Return whether somebody counts or transforms operations."""
    return bool(torch._C._len_torch_dispatch_stack()) or peek_interpreter_stack() is not None


def is_plain(value: Any) -> bool:
    """Return whether a value is a tensor with bytes in memory, and no subclass."""
    return type(value) is Tensor and value.layout == torch.strided and torch._C._has_storage(value)


def find_layers(
    root: nn.Module,
    plan: ModulationPlan,
    *,
    make: Callable[[nn.Module, nn.Module], CachedLayer | None] = CachedLayer,
    is_frozen: bool = False,
) -> list[CachedLayer]:
    """Return the frozen layers that ``plan`` names, in the order of the model.

    Layers that train themselves are left out; an adapter's child modules do not count.

    Args:
        root: The model.
        plan: Which layers.
        make: Makes a layer from the module around the Linear and the Linear, or leaves it out.
        is_frozen: Nothing trains, whatever ``requires_grad`` says.

    Raises:
        RequestError: If a path matches nothing, no Linear is there, or the module around it has weights
            of its own that would decide the input too.
    """
    chosen: dict[int, CachedLayer] = {}
    for rule in plan.layers:
        try:
            parents = find_modules(root, rule.parent)
            pairs = [(path, parent, find_modules(parent, rule.linear)[0][1]) for path, parent in parents]
        except PlanError as error:
            raise RequestError(
                f"caching the modulation {rule.parent!r} / {rule.linear!r} was asked",
                limit=str(error),
                way_out="Name modules of this model",
            ) from error
        for path, parent, linear in pairs:
            _check(path, parent, linear, rule.linear)
            trains = any(tensor.requires_grad for _, tensor in _own_tensors(linear))
            layer = make(parent, linear) if is_frozen or not trains else None
            if layer is not None:
                chosen.setdefault(id(linear), layer)
    order = {id(module): index for index, module in enumerate(root.modules())}
    return sorted(chosen.values(), key=lambda layer: order[id(layer.linear)])


def _check(path: str, parent: nn.Module, linear: Any, linear_path: str) -> None:
    is_linear = isinstance(linear, nn.Linear) or (
        isinstance(getattr(linear, "in_features", None), int)
        and isinstance(getattr(linear, "out_features", None), int)
        and "weight" in linear._parameters
    )
    if not is_linear:
        raise RequestError(
            f"caching the modulation layer in {path!r} was asked",
            limit=f"It is a {type(linear).__name__}, and only a Linear is known to have no other input",
            way_out="Name the Linear itself (a wrapper's base layer, if an adapter library wrapped it)",
        )
    wrapper, _, name = linear_path.rpartition(".")
    # PEFT's adapters stand around a `base_layer`, which they call with the input that they were given.
    own = find_modules(parent, wrapper)[0][1] if name == "base_layer" else linear
    inside = {id(module) for module in own.modules()}
    for module in parent.modules():
        decides = any(True for _ in _own_tensors(module)) or isinstance(module, nn.modules.dropout._DropoutNd)
        if id(module) not in inside and decides:
            raise RequestError(
                f"caching the modulation layer in {path!r} was asked",
                limit=f"{type(module).__name__} in it decides the layer's input too",
                way_out="Name a module that holds the Linear and activations only, or the Linear itself",
            )


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for table in (module._parameters, module._buffers):
        yield from ((name, tensor) for name, tensor in dict.items(table) if tensor is not None)


def _managed(module: nn.Module, name: str) -> Any:
    tables: tuple[Any, ...] = (module._parameters, module._buffers)
    for table in tables:
        if isinstance(table, ManagedDict) and name in table.managed:
            return table.managed[name]
    return None
