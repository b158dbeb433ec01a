"""Attention of whole queries over keys of which each rank has a part: partial results, merged.

For few queries that every rank has (audio) over many keys (video): what travels is a result for each
query instead of the keys. Parts are merged as in ``ring``.

Shapes: ``B`` batch, ``H`` heads, ``Q`` queries, ``K_local`` keys of this rank, ``D`` head dim, ``P`` ranks.
"""

from __future__ import annotations

from functools import reduce

import torch
import torch.distributed as dist

from ...errors import PlanError
from ..collectives import all_gather
from .local import AttentionCall
from .lse import PartialAttention, attend_part
from .ring import ring_scale


def sharded_keys_attention(call: AttentionCall, *, group: dist.ProcessGroup) -> torch.Tensor:
    """Attend over the keys of all ranks; all ranks of ``group`` must call, with the same queries.

    Args:
        call: q ``[B, H, Q, D]``, the same on every rank; k and v ``[B, H, K_local, D]``. ``K_local`` may
            differ and be 0.
        group: The ranks that share the keys.

    Returns:
        ``[B, Q, H * D]``, contiguous, the same bits on every rank.

    Raises:
        PlanError: If the call has a mask.
    """
    if call.mask is not None:
        raise PlanError("attention over sharded keys got a mask, which it does not support")
    q, scale = call.q, ring_scale(call.options)
    if call.k.shape[2]:
        part = attend_part(q, call.k, call.v, mask=None, scale=scale)
        mine = torch.cat([part.sums.float(), part.largest, part.weights], dim=-1)
    else:
        mine = q.new_zeros(*q.shape[:3], q.shape[3] + 2, dtype=torch.float32)
        mine[..., -2] = -torch.inf
    everyone = all_gather(mine.unsqueeze(0), [1] * dist.get_world_size(group), group=group)
    parts = [PartialAttention(*rank.split([q.shape[3], 1, 1], dim=-1)) for rank in everyone]
    return reduce(PartialAttention.merge, parts).output(q.dtype).flatten(2)
