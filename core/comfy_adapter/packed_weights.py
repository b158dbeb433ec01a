"""Weights in GGUF's blocks, for other processes: as plain tensors and a description, and back; their parts.

What this module does not do: a product is made where ``PackedWeight`` makes it, the same in every process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..offload import GGUF_FORMATS, GgufFormat, PackedWeight
from ..parallel import TensorPart, join_pieces

_BLOCKS = ":blocks"


def plain_tensors(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the tensors that one parameter is made of, by name; itself if it is not packed."""
    return {f"{name}{_BLOCKS}": tensor.blocks} if isinstance(tensor, PackedWeight) else {name: tensor}


def describe(module: nn.Module) -> dict[str, Any]:
    """Return what another process needs to put the packed weights of a model together, by name."""
    named = module.named_parameters(remove_duplicate=False)
    return {
        name: {"form": weight.form, "dtypes": list(weight.dtypes)}
        for name, weight in named
        if isinstance(weight, PackedWeight)
    }


def join(description: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors by the names of parameters and buffers: packed weights put together.

    Args:
        description: The message of ``describe``.
        tensors: Plain tensors by name.
    """
    joined = dict(tensors)
    for name, one in description.items():
        joined[name] = PackedWeight(joined.pop(f"{name}{_BLOCKS}"), one["form"], tuple(one["dtypes"]))
    return joined


def cut(
    weight: PackedWeight, part: TensorPart, join: Callable[[Sequence[torch.Tensor], int], torch.Tensor]
) -> torch.Tensor:
    """Return a rank's part of a weight; packed unless the cut goes through blocks.

    Args:
        weight: The whole.
        part: Some of it.
        join: Makes one tensor of pieces of the blocks, in the given dim.
    """
    layout = GGUF_FORMATS[weight.form]
    if part.dim == 1:
        if any(place % layout.weights for place in (part.size, *sum(part.ranges, ()))):
            return join_pieces(part.pieces(weight.dense()), part.dim).contiguous()
        ranges = tuple((_in_bytes(start, layout), _in_bytes(stop, layout)) for start, stop in part.ranges)
        part = TensorPart(1, weight.blocks.shape[1], ranges)
    blocks = join(part.pieces(weight.blocks), part.dim).contiguous()
    return PackedWeight(blocks, weight.form, weight.dtypes)


def dense_on(weight: PackedWeight, device: torch.device) -> torch.Tensor:
    """Return the dense weight on a device, to which the blocks go."""
    moved: Any = weight.to(device)
    return moved.dense()


def _in_bytes(column: int, layout: GgufFormat) -> int:
    return column // layout.weights * layout.nbytes
