"""How a model is cut for streaming: its repeated blocks, and the rim around them.

A block is a child of a ``ModuleList`` that has a forward of its own, the outermost one where they
nest; of a ``Sequential`` there, each part, because such a one is often walked through by hand (the
UNets of Stable Diffusion do). Everything else (embeddings, final layers, buffers, and whatever two
blocks share) is the rim, which is read from anywhere and therefore stays on the target.

What this module does not do: it neither moves nor changes anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..errors import RequestError
from .segments import group_overlapping
from .units import has_forward, owned_tensors
from .wrappers import take_apart


@dataclass(frozen=True, eq=False)
class StreamEntry:
    """One place in the model where a tensor is registered.

    Attributes:
        module: The module that owns it.
        name: Its name there.
        path: Dotted path from the root.
        is_parameter: Whether it is a parameter (else a buffer).
        tensor: The object registered when the plan was made.
    """

    module: nn.Module
    name: str
    path: str
    is_parameter: bool
    tensor: torch.Tensor

    @property
    def table(self) -> dict[str, Any]:
        """Return the module's dictionary of parameters or of buffers."""
        return self.module.__dict__["_parameters" if self.is_parameter else "_buffers"]


@dataclass(frozen=True, eq=False)
class BlockPlan:
    """One block, or the rim (whose module is the root)."""

    path: str
    module: nn.Module
    entries: tuple[StreamEntry, ...]


def plan_blocks(
    root: nn.Module, aside: Sequence[nn.Module] = ()
) -> tuple[list[BlockPlan], list[BlockPlan], BlockPlan]:
    """Return the blocks in model order, the asides, and the rim; every tensor is in exactly one of them.

    Args:
        root: The model.
        aside: Modules whose tensors leave their block for one of their own, if they are part of a block.

    Raises:
        RequestError: If a tensor has no bytes in memory to stream.
    """
    modules = list(_find_blocks(root, ""))
    owners: dict[int, int] = {}
    for index, (_, block) in enumerate(modules):
        for child in block.modules():
            owners.setdefault(id(child), index)
    paths = {id(module): path for path, module in root.named_modules()}
    asides = [(paths[id(module)], module) for module in aside if id(module) in owners]
    parts = [*modules, *asides]
    for index, (_, module) in enumerate(asides, start=len(modules)):
        owners.update((id(child), index) for child in module.modules())
    entries = list(_entries(root))
    for entry in entries:
        _check_memory(entry)
    home = [owners.get(id(entry.module), -1) for entry in entries]
    _move_shared_to_rim(entries, home)
    grouped: dict[int, list[StreamEntry]] = {}
    for entry, index in zip(entries, home, strict=True):
        grouped.setdefault(index, []).append(entry)
    made = [
        (index, BlockPlan(path, module, tuple(grouped[index])))
        for index, (path, module) in enumerate(parts)
        if index in grouped
    ]
    return (
        [plan for index, plan in made if index < len(modules)],
        [plan for index, plan in made if index >= len(modules)],
        BlockPlan("", root, tuple(grouped.get(-1, ()))),
    )


def _find_blocks(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        child_path = f"{path}.{name}" if path else name
        if isinstance(module, nn.ModuleList) and isinstance(child, nn.Sequential):
            yield from _owners(child.named_children(), child_path)
        elif isinstance(module, nn.ModuleList) and has_forward(child):
            yield from _owners([("", child)], child_path)
        else:
            yield from _find_blocks(child, child_path)


def _owners(children: Iterable[tuple[str, nn.Module]], path: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in children:
        if any(True for part in child.modules() for _ in owned_tensors(part)):
            yield (f"{path}.{name}" if name else path), child


def _entries(root: nn.Module) -> Iterator[StreamEntry]:
    for path, module in root.named_modules():
        for tensors, is_parameter in ((module._parameters, True), (module._buffers, False)):
            for name, tensor in tensors.items():
                if tensor is not None:
                    full = f"{path}.{name}" if path else name
                    yield StreamEntry(module, name, full, is_parameter, tensor)


def _check_memory(entry: StreamEntry) -> None:
    for leaf in take_apart(entry.tensor)[0]:
        if leaf.device.type not in ("cpu", "cuda") or leaf.layout != torch.strided:
            raise RequestError(
                f"streaming {entry.path} was asked",
                limit=f"It is a {leaf.layout} tensor on {leaf.device}; only dense bytes in memory can stream",
                way_out="Load the model's weights completely first",
            )


def _move_shared_to_rim(entries: list[StreamEntry], home: list[int]) -> None:
    """Give the rim (-1) every entry that shares bytes with an entry of another block."""
    leaves: list[tuple[int, torch.Tensor]] = []
    for index, entry in enumerate(entries):
        leaves.extend((index, leaf) for leaf in take_apart(entry.tensor)[0])
    groups = [
        sorted({leaves[leaf][0] for leaf, _ in plan.layouts})
        for plan in group_overlapping([leaf for _, leaf in leaves])
    ]
    changed = True
    while changed:
        changed = False
        for members in groups:
            if len({home[member] for member in members}) > 1:
                for member in members:
                    changed |= home[member] != -1
                    home[member] = -1
