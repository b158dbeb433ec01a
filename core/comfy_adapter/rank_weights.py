"""What one rank holds of a model's weights, cut from the whole ones that all workers read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..offload import HostParts
from ..parallel import ModelPlan, RankLayout, TensorParallelHandle, TensorPart, TensorShards
from .quantized_parts import cut
from .row_ranges import install_row_ranges


class RankWeights:
    """Cuts weights.

    Args:
        shards: Which part of each this rank holds; None: all of all.
        device: Where the rank computes.
        streams: Whether its weights wait in host memory and come to the device when they are used. Then none
            is copied in host memory; parts that lie apart there are named in ``parts``.
    """

    def __init__(self, shards: TensorShards | None, device: torch.device, *, streams: bool) -> None:
        self.parts = HostParts() if streams else None
        self.shards = shards
        self._device = device

    def find(self, name: str) -> TensorPart | None:
        """Return which part of a weight this rank holds; None: all of it."""
        return None if self.shards is None else self.shards.parts.get(name)

    def place(self, name: str, whole: torch.Tensor) -> torch.Tensor | None:
        """Return what the rank holds of a tensor, where it waits; None if another rank holds all of it.

        On a CPU worker and for one that streams it shares the memory of ``whole``, where one tensor can.
        """
        part = self.find(name)
        if part is None:
            return whole if self.parts is not None else whole.to(self._device)
        if self.parts is not None:
            return cut(whole, part, join=self._stand_in)
        held = cut(whole, part)
        if held is None or self._device.type == "cpu":
            return held
        return held.to(self._device).contiguous()

    def own(self, name: str, whole: torch.Tensor) -> torch.Tensor | None:
        """Return the rank's part of a tensor made for it, which may go then."""
        part = self.find(name)
        if part is None:
            return whole.to(self._device)
        held = cut(whole, part)
        # A view would keep all of it on the device.
        return None if held is None else held.clone(memory_format=torch.contiguous_format)

    def _stand_in(self, pieces: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
        assert self.parts is not None
        if len(pieces) == 1 and pieces[0].is_contiguous():
            return pieces[0]
        return self.parts.stand_in(pieces, dim)


def find_tensor_handle(module: nn.Module, plan: ModelPlan, layout: RankLayout) -> TensorParallelHandle | None:
    """Return what computes with this rank's part of the weights; None if it holds all of them."""
    group: Any = layout.tensor_group
    if group is None:
        return None
    degree, rank = torch.distributed.get_world_size(group), torch.distributed.get_rank(group)
    shards = TensorShards(module, plan, degree=degree, rank=rank)
    install_row_ranges(module, shards, group)
    return TensorParallelHandle(shards, group)
