"""Bring attention masks into the token order and the heads of one rank.

Attention does not depend on the order of tokens as long as queries, keys and mask agree, so tokens
stay in rank-major order, which the exchange gives for free, and only a mask is permuted.

Shapes: ``S`` tokens of the whole joint sequence, ``H`` heads.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from ...errors import PlanError
from ..collectives import all_gather
from ..sequence import Streams, drop_phantoms, joint_sizes, rank_major_order


class MaskMemo:
    """The masks of one forward, prepared once although every block brings them."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        # The source mask is kept beside the result so that its id stays its own.
        self._whole: dict[tuple[int, Streams], tuple[torch.Tensor, torch.Tensor]] = {}
        self._gathered: dict[Streams, torch.Tensor] = {}

    def from_whole(self, mask: torch.Tensor, streams: Streams) -> torch.Tensor:
        """Return a whole mask ``[..., 1 | S, S]`` in rank-major order.

        Raises:
            PlanError: If its last two dims are not those.
        """
        key = (id(mask), streams)
        if key not in self._whole:
            length = sum(stream.length for stream in streams)
            if mask.ndim < 2 or mask.shape[-1] != length or mask.shape[-2] not in (1, length):
                raise PlanError(
                    f"a mask of shape {tuple(mask.shape)} does not fit a sequence of {length} tokens"
                )
            self._whole[key] = (mask, _permuted(mask, streams))
        return self._whole[key][1]

    def from_local_keys(self, mask: torch.Tensor, streams: Streams) -> torch.Tensor:
        """Return the whole key mask ``[..., 1, S]`` from each rank's ``[..., 1, carried]``.

        Collective on the first call of a forward only, which is rank-identical because every rank
        runs the same blocks.

        Raises:
            PlanError: If the mask has a row for each query.
        """
        if streams not in self._gathered:
            if mask.ndim < 2 or mask.shape[-2] != 1:
                raise PlanError(
                    f"a mask of shape {tuple(mask.shape)} was given where the plan expects a key mask"
                )
            local = drop_phantoms(mask, streams, mask.ndim - 1).movedim(-1, 0)
            whole = all_gather(local, joint_sizes(streams), group=self._group)
            self._gathered[streams] = whole.movedim(0, -1)
        return self._gathered[streams]


def head_slice(mask: torch.Tensor, first: int, count: int, *, num_heads: int) -> torch.Tensor:
    """Return the part of a mask for ``count`` heads from ``first`` on.

    Args:
        mask: ``[S, S]``, ``[B, S, S]``, ``[B, 1, S, S]`` or ``[B, H, S, S]``.
        first: The first head.
        count: How many.
        num_heads: ``H``.
    """
    has_heads = mask.ndim == 4 and mask.shape[1] == num_heads and num_heads > 1
    return mask.narrow(1, first, count) if has_heads else mask


def four_dims(mask: torch.Tensor | None) -> torch.Tensor | None:
    """Return the mask with all four dims, broadcastable to ``[B, H, S, S]``; see ``head_slice``."""
    if mask is None or mask.ndim == 4:
        return mask
    return mask[None, None] if mask.ndim == 2 else mask.unsqueeze(1)


def _permuted(mask: torch.Tensor, streams: Streams) -> torch.Tensor:
    if len(streams) == 1:
        return mask
    order = rank_major_order(streams, mask.device)
    columns = mask.index_select(-1, order)
    return columns if mask.shape[-2] == 1 else columns.index_select(-2, order)
