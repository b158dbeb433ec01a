"""Which modules move together.

Without a threshold every leaf module is a unit. With one, a module of at most that many bytes moves
as a whole and larger ones are split into their children. Parameters and buffers that a split module
holds itself form a unit of their own, used by that module's forward. A container without a forward
(``ModuleList``, ``ParameterDict``) is always split, because nothing calls it.

What this module does not do: it neither moves nor changes anything.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
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
        members: Modules below ``module`` that have no tensors of their own and move with it, as those
            below them do.
    """

    path: str
    module: nn.Module
    owners: tuple[tuple[str, nn.Module], ...]
    members: tuple[nn.Module, ...] = ()


def plan_units(
    root: nn.Module, split_threshold_bytes: int | None, *, apart: Collection[nn.Module] = ()
) -> list[UnitPlan]:
    """Return the units of the model in model order; every module that owns a tensor is in exactly one.

    Args:
        root: The model.
        split_threshold_bytes: A module of at most this size moves as a whole; None: leaf modules.
        apart: Modules whose own tensors never move with others; they do not count for a module's size.
    """
    walk = _Walk(split_threshold_bytes, {id(module) for module in apart})
    return list(walk.visit(root, ""))


def has_forward(module: nn.Module) -> bool:
    """Return whether calling the module does something of its own."""
    if "forward" in module.__dict__:
        return True
    return type(module).forward is not nn.Module.forward


def owned_tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the module's own parameters and buffers (not its children's)."""
    for tensors in (module._parameters, module._buffers):
        yield from (tensor for tensor in tensors.values() if tensor is not None)


def module_bytes(module: nn.Module, *, apart: Collection[int] = ()) -> int:
    """Return the bytes of all parameters and buffers below ``module``, each counted once.

    Args:
        module: Where to start.
        apart: ``id`` of modules whose own tensors do not count.
    """
    counted = (child for child in module.modules() if id(child) not in apart)
    tensors = {id(tensor): tensor for child in counted for tensor in owned_tensors(child)}
    return sum(tensor.numel() * tensor.dtype.itemsize for tensor in tensors.values())


class _Walk:
    def __init__(self, threshold: int | None, apart: set[int]) -> None:
        self._threshold = threshold
        self._apart = apart
        self._seen: set[int] = set()

    def visit(self, module: nn.Module, path: str) -> Iterator[UnitPlan]:
        if id(module) in self._seen:
            return
        if id(module) not in self._apart and self._moves_whole(module):
            members = [(_join(path, name), child) for name, child in module.named_modules()]
            owners = [
                member
                for member in members
                if id(member[1]) not in self._seen and id(member[1]) not in self._apart
            ]
            self._seen |= {id(child) for _, child in owners}
            whole = tuple(child for _, child in owners if self._is_whole(child))
            yield from _unit(path, module, owners, members=whole)
            for name, child in members:
                yield from self.visit(child, name)
            return
        self._seen.add(id(module))
        yield from _unit(path, module, [(path, module)])
        for name, child in module.named_children():
            yield from self.visit(child, _join(path, name))

    def _moves_whole(self, module: nn.Module) -> bool:
        if self._threshold is None or not has_forward(module):
            return False
        return module_bytes(module, apart=self._apart) <= self._threshold

    def _is_whole(self, module: nn.Module) -> bool:
        return not any(id(child) in self._apart for child in module.modules())


def _unit(
    path: str,
    module: nn.Module,
    owners: list[tuple[str, nn.Module]],
    *,
    members: tuple[nn.Module, ...] = (),
) -> Iterator[UnitPlan]:
    holders = [(name, owner) for name, owner in owners if any(True for _ in owned_tensors(owner))]
    if holders:
        holding = {id(owner) for _, owner in holders}
        without = tuple(member for member in members if id(member) not in holding)
        yield UnitPlan(path=path, module=module, owners=tuple(holders), members=without)


def _join(path: str, name: str) -> str:
    return ".".join(part for part in (path, name) if part)
