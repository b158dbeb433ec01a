"""Which modules move together.

Without a threshold every leaf module is a unit. With one, a module of at most that many bytes moves
as a whole and larger ones are split into their children. Parameters and buffers that a split module
holds itself form a unit of their own, used by that module's forward. A container without a forward
(``ModuleList``, ``ParameterDict``) is always split, because nothing calls it.

What this module does not do: it neither moves nor changes anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, eq=False)
class UnitPlan:
    """One unit.

    Attributes:
        path: Dotted path of the module whose forward uses the unit.
        module: That module.
        owners: ``(path, module)`` of every module whose own tensors belong to it.
    """

    path: str
    module: nn.Module
    owners: tuple[tuple[str, nn.Module], ...]


def plan_units(root: nn.Module, split_threshold_bytes: int | None) -> list[UnitPlan]:
    """Return the units of the model in model order; every module that owns a tensor is in exactly one."""
    seen: set[int] = set()
    return list(_visit(root, "", split_threshold_bytes, seen))


def has_forward(module: nn.Module) -> bool:
    """Return whether calling the module does something of its own."""
    if "forward" in module.__dict__:
        return True
    return type(module).forward is not nn.Module.forward


def owned_tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the module's own parameters and buffers (not its children's)."""
    for tensors in (module._parameters, module._buffers):
        yield from (tensor for tensor in tensors.values() if tensor is not None)


def module_bytes(module: nn.Module) -> int:
    """Return the bytes of all parameters and buffers below ``module``, each counted once."""
    tensors = {id(tensor): tensor for child in module.modules() for tensor in owned_tensors(child)}
    return sum(tensor.numel() * tensor.dtype.itemsize for tensor in tensors.values())


def _visit(module: nn.Module, path: str, threshold: int | None, seen: set[int]) -> Iterator[UnitPlan]:
    if id(module) in seen:
        return
    whole = threshold is not None and has_forward(module) and module_bytes(module) <= threshold
    if whole:
        owners = []
        for name, child in module.named_modules():
            if id(child) not in seen:
                seen.add(id(child))
                owners.append((_join(path, name), child))
        yield from _unit(path, module, owners)
        return
    seen.add(id(module))
    yield from _unit(path, module, [(path, module)])
    for name, child in module.named_children():
        yield from _visit(child, _join(path, name), threshold, seen)


def _unit(path: str, module: nn.Module, owners: list[tuple[str, nn.Module]]) -> Iterator[UnitPlan]:
    holders = [(name, owner) for name, owner in owners if any(True for _ in owned_tensors(owner))]
    if holders:
        yield UnitPlan(path=path, module=module, owners=tuple(holders))


def _join(path: str, name: str) -> str:
    return ".".join(part for part in (path, name) if part)
