"""Attention over a sequence by Ulysses, by Ring, or by both on two axes of ranks.

Source of the hybrid: USP, arXiv:2405.07719. Ranks of one Ulysses group are neighbours and hold one
chunk of the ring between them: they trade the chunk's tokens for heads, then each attends with its
heads over the ring of ranks that have the same heads, and the first trade is undone.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from ..collectives import refuse_gradients
from ..mesh import SequenceGroup
from .local import AttentionCall
from .ring import ring_attention, ring_scale
from .ulysses import ulysses_attention


def sequence_attention(
    call: AttentionCall, *, token_sizes: tuple[int, ...], mask: torch.Tensor | None, group: SequenceGroup
) -> torch.Tensor:
    """Attend over the whole sequence; all ranks of ``group`` must call.

    Args:
        call: q, k, v ``[B, H, S_local, D]`` of this rank's tokens, and the backend.
        token_sizes: Tokens on each rank of the whole group.
        mask: For all heads, ``[..., 1 | S, S]`` in rank-major order, or None.
        group: The ranks that share the sequence.

    Returns:
        ``[B, S_local, H * D]``, contiguous.

    Raises:
        PlanError: If a gradient is to flow through it.
    """
    # Here, because a rank without tokens packs none that a gradient flows to, and would wait for the others.
    for tensor in (call.q, call.k, call.v):
        refuse_gradients(tensor)
    ring = group.ring
    if ring is None:
        assert group.ulysses is not None
        return ulysses_attention(call, token_sizes=token_sizes, mask=mask, group=group.ulysses)
    width = len(token_sizes) // dist.get_world_size(ring)
    chunks = [token_sizes[first : first + width] for first in range(0, len(token_sizes), width)]
    chunk_sizes = tuple(map(sum, chunks))
    scale = ring_scale(call.options)
    mask = call.read_mask(mask)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        return ring_attention(q, k, v, chunk_sizes=chunk_sizes, mask=mask, scale=scale, group=ring)

    if group.ulysses is None:
        return attend(call.q, call.k, call.v, mask)
    return ulysses_attention(
        call, token_sizes=chunks[dist.get_rank(ring)], mask=mask, group=group.ulysses, attend=attend
    )
