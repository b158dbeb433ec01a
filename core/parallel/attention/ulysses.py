"""Ulysses attention: exchange token parts for head parts, attend, exchange back.

Source: DeepSpeed-Ulysses, arXiv:2309.14509. Different here: q, k and v travel in one collective;
tokens and heads may be cut unevenly, down to none on a rank; and buffers are token-first, so what
arrives is already the whole sequence (in rank-major order) and is not copied again.

Shapes: ``B`` batch, ``S`` tokens of the whole sequence, ``S_local`` on this rank, ``H`` heads,
``h`` heads of one rank, ``D`` head dim, ``P`` ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import torch
import torch.distributed as dist

from ..collectives import all_to_all
from ..sequence import split_sizes
from .local import AttentionCall
from .masks import head_slice

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


def ulysses_attention(
    call: AttentionCall,
    *,
    token_sizes: tuple[int, ...],
    mask: torch.Tensor | None,
    group: dist.ProcessGroup,
    attend: Attend | None = None,
) -> torch.Tensor:
    """Attend over the whole sequence; all ranks of ``group`` must call.

    Args:
        call: q, k, v ``[B, H, S_local, D]`` of this rank's tokens, and the backend.
        token_sizes: Tokens on each rank.
        mask: For all heads, ``[..., 1 | S, S]`` in rank-major order, or None.
        group: The ranks that share the sequence.
        attend: Called with q, k, v ``[B, h, S, D]`` and this rank's mask instead of the backend, and
            returns ``[B, S, h * D]``: how a chunk of a longer sequence attends to all of it. Not
            called where ``h`` is 0.

    Returns:
        ``[B, S_local, H * D]``, contiguous.
    """
    rank = dist.get_rank(group)
    batch, num_heads, num_local, head_dim = call.q.shape
    head_sizes = split_sizes(num_heads, len(token_sizes))
    row = batch * head_dim
    received = all_to_all(
        _pack((call.q, call.k, call.v), head_sizes),
        [3 * row * num_local * heads for heads in head_sizes],
        receive_sizes=[3 * row * head_sizes[rank] * tokens for tokens in token_sizes],
        group=group,
    )
    heads = head_sizes[rank]
    output = received.new_empty(0)
    if heads:
        # [S, 3, B, h, D] -> three of [B, h, S, D]
        q, k, v = received.view(sum(token_sizes), 3, batch, heads, head_dim).permute(1, 2, 3, 0, 4)
        if mask is not None:
            mask = head_slice(mask, sum(head_sizes[:rank]), heads, num_heads=num_heads)
        output = (attend or call.run)(q, k, v, mask)
        # Token-first; no copy for a batch of one.
        output = output.transpose(0, 1).reshape(-1)
    returned = all_to_all(
        output,
        [row * heads * tokens for tokens in token_sizes],
        receive_sizes=[row * num_local * size for size in head_sizes],
        group=group,
    )
    parts = returned.split([row * num_local * size for size in head_sizes])
    by_rank = [
        part.view(num_local, batch, size * head_dim) for part, size in zip(parts, head_sizes, strict=True)
    ]
    return torch.cat([part.transpose(0, 1) for part in by_rank], dim=-1)


def _pack(tensors: tuple[torch.Tensor, ...], head_sizes: tuple[int, ...]) -> torch.Tensor:
    """Return q, k, v ``[B, H, S_local, D]`` as one flat buffer, for each rank ``[S_local, 3, B, h, D]``."""
    if len(set(head_sizes)) == 1:
        by_rank = [tensor.unflatten(1, (len(head_sizes), -1)).permute(1, 3, 0, 2, 4) for tensor in tensors]
        return torch.stack(by_rank, dim=2).view(-1)
    starts = accumulate(head_sizes, initial=0)
    token_first = [tensor.permute(2, 0, 1, 3) for tensor in tensors]
    packed = [
        torch.stack([tensor.narrow(2, start, size) for tensor in token_first], dim=1).view(-1)
        for start, size in zip(starts, head_sizes, strict=False)
    ]
    return torch.cat(packed)
