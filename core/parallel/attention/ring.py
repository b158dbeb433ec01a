"""Ring attention: queries stay, keys and values travel round the ranks.

Source: Ring Attention, arXiv:2310.01889. Different here: chunks may be uneven and empty, masks are
exact, and a chunk of keys and values is one message.

There is no head limit, but the caller's backend cannot be used: parts can be merged only by kernels
that tell the weight of a part (``lse``).

Shapes: ``B`` batch, ``H`` heads, ``D`` head dim, ``S`` tokens of the whole sequence, ``S_local`` in
this rank's chunk.
"""

from __future__ import annotations

from itertools import accumulate

import torch
import torch.distributed as dist

from ...errors import PlanError
from ..exchange_timer import waiting
from .lse import PartialAttention, attend_part
from .masks import four_dims

# What may come with a call besides its tensors and mask. Scores are computed in fp32 as the first two
# ask; heads were checked to be equal; a hint to use a less precise kernel need not be followed.
_KNOWN_OPTIONS = frozenset(
    {"attn_precision", "low_precision_attention", "enable_gqa", "transformer_options", "scale"}
)

Chunk = tuple[torch.Tensor, torch.Tensor]


def ring_scale(options: dict) -> float | None:
    """Return the scale of the scores that a call asks for.

    Raises:
        PlanError: If it asks for something that the ring's kernels do not know.
    """
    # A leading underscore marks what a caller leaves for itself.
    unknown = sorted(
        name
        for name, value in options.items()
        if value is not None and name not in _KNOWN_OPTIONS and not name.startswith("_")
    )
    if unknown:
        raise PlanError(f"ring attention does not know the attention options {unknown}; use ring degree 1")
    return options.get("scale")


def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    chunk_sizes: tuple[int, ...],
    mask: torch.Tensor | None,
    scale: float | None,
    group: dist.ProcessGroup,
) -> torch.Tensor:
    """Attend over the whole sequence; all ranks of ``group`` must call.

    Args:
        q: ``[B, H, S_local, D]`` of this rank's chunk, any strides; ``k`` and ``v`` alike.
        k: Likewise.
        v: Likewise.
        chunk_sizes: Tokens of each rank's chunk; 0 is allowed.
        mask: ``[..., 1 | S, S]`` in the order of the chunks, or None; see ``masks.head_slice``.
        scale: Of the scores; None is ``D ** -0.5``.
        group: The ranks, each with one chunk.

    Returns:
        ``[B, S_local, H * D]``, contiguous.
    """
    rank, num_ranks = dist.get_rank(group), len(chunk_sizes)
    stops = list(accumulate(chunk_sizes))
    starts = [stop - size for stop, size in zip(stops, chunk_sizes, strict=True)]
    mask = _rows_of(four_dims(mask), starts[rank], stops[rank])
    result: PartialAttention | None = None
    message = _pack(k, v)
    for step in range(num_ranks):
        current = (rank - step) % num_ranks
        last = step == num_ranks - 1
        following = (current - 1) % num_ranks
        # Posted before this chunk's attention, so that the two overlap.
        transfer = None if last else _Transfer(message, _message_like(k, chunk_sizes[following]), group)
        if q.shape[2] and chunk_sizes[current]:
            keys = None if mask is None else mask[..., starts[current] : stops[current]]
            chunk = (k, v) if step == 0 else _unpack(message, k, chunk_sizes[current])
            part = attend_part(q, *chunk, mask=keys, scale=scale)
            result = part if result is None else result.merge(part)
        if transfer is not None:
            message = transfer.wait()
    if result is None:
        return q.new_zeros(q.shape[0], q.shape[2], q.shape[1] * q.shape[3])
    return result.output(q.dtype).flatten(2)


class _Transfer:
    """One step of the ring, under way: this rank's message to the next rank, the previous one's here."""

    def __init__(self, send: torch.Tensor, receive: torch.Tensor, group: dist.ProcessGroup) -> None:
        rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
        following = dist.get_global_rank(group, (rank + 1) % num_ranks)
        previous = dist.get_global_rank(group, (rank - 1) % num_ranks)
        # Both are kept until the end: the messages are read and written meanwhile.
        self.send, self.receive = send, receive
        self.works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, send, following, group),
                dist.P2POp(dist.irecv, receive, previous, group),
            ]
        )

    def wait(self) -> torch.Tensor:
        """Return the message received; on CUDA the current stream waits, not the host."""
        with waiting(self.receive.device):
            for work in self.works:
                work.wait()
        return self.receive


def _pack(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return k and v as one flat message; an empty chunk is one element, since every rank always sends."""
    return torch.stack((k, v)).view(-1) if k.numel() else k.new_zeros(1)


def _message_like(k: torch.Tensor, num_tokens: int) -> torch.Tensor:
    batch, num_heads, _, head_dim = k.shape
    return k.new_empty(max(1, 2 * batch * num_heads * num_tokens * head_dim))


def _unpack(message: torch.Tensor, k: torch.Tensor, num_tokens: int) -> Chunk:
    keys, values = message.view(2, k.shape[0], k.shape[1], num_tokens, k.shape[3])
    return keys, values


def _rows_of(mask: torch.Tensor | None, start: int, stop: int) -> torch.Tensor | None:
    return mask if mask is None or mask.shape[-2] == 1 else mask[..., start:stop, :]
