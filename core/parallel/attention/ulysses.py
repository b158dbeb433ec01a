"""Ulysses attention: exchange token parts for head parts, attend, exchange back.

Source: DeepSpeed-Ulysses, arXiv:2309.14509. Different here: q, k and v travel in one collective;
tokens and heads may be cut unevenly, down to none on a rank; buffers are token-first, so what arrives
is already the whole sequence (in rank-major order) and is not copied again; and a large exchange goes by
groups of heads, so that one group travels while another is attended. (A rank sends its own part to itself
too: on NVLink that takes no time beside the others', and copying it apart takes the host's.)

Shapes: ``B`` batch, ``S`` tokens of the whole sequence, ``S_local`` on this rank, ``H`` heads,
``h`` heads of one rank in one group, ``D`` head dim, ``P`` ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed as dist

from ..collectives import Transfer, start_all_to_all
from ..sequence import split_sizes
from .local import AttentionCall
from .masks import head_slice

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
Heads = tuple[range, ...]

# The least that a group of heads brings from other ranks, and the most groups. Two H200 with NVLink gain
# nothing at 73 MiB in all (Qwen-Image, 2048 pixels): 0.3 ms to hide, and both kernels slow each other down.
GROUP_BYTES = 64 * 2**20
MAX_GROUPS = 4


def ulysses_attention(
    call: AttentionCall,
    *,
    token_sizes: tuple[int, ...],
    mask: torch.Tensor | None,
    group: dist.ProcessGroup,
    attend: Attend | None = None,
    num_groups: int | None = None,
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
        num_groups: Groups of heads, the same on every rank; None chooses by the size of the messages, and
            one where ``attend`` communicates too.

    Returns:
        ``[B, S_local, H * D]``, contiguous.
    """
    batch, num_heads, num_local, head_dim = call.q.shape
    if num_groups is None:
        row_bytes = 3 * batch * head_dim * call.q.element_size()
        num_groups = 1 if attend else _num_groups(num_heads, token_sizes, row_bytes)
    exchange = _Exchange(token_sizes, dist.get_rank(group), group, overlapped=num_groups > 1)
    tensors = _widest((call.q, call.k, call.v))
    result = call.q.new_empty(batch, num_local, num_heads, head_dim)
    target = result.view(tensors[0].dtype)
    groups = head_groups(num_heads, len(token_sizes), num_groups)
    arriving = [exchange.tokens_to_heads(tensors, heads) for heads in groups]
    returning = []
    for heads, (transfer, received) in zip(groups, arriving, strict=True):
        mine = heads[exchange.rank]
        transfer.wait()
        output = received.new_empty(0)
        if mine:
            # [S, 3, B, h, D] -> three of [B, h, S, D]
            q, k, v = received.view(call.q.dtype).permute(1, 2, 3, 0, 4)
            part = None if mask is None else head_slice(mask, mine.start, len(mine), num_heads=num_heads)
            output = (attend or call.run)(q, k, v, part)
            # Token-first; no copy for a batch of one.
            output = output.transpose(0, 1).contiguous().to(result.dtype).view(target.dtype)
        returning.append(exchange.heads_to_tokens(output, heads, target))
    for finish in returning:
        finish()
    return result.flatten(2)


@functools.lru_cache(maxsize=256)
def head_groups(num_heads: int, num_ranks: int, num_groups: int) -> tuple[Heads, ...]:
    """Return for each group the heads of each rank; a rank's heads follow each other over the groups."""
    sizes = split_sizes(num_heads, num_ranks)
    shares = [split_sizes(size, num_groups) for size in sizes]
    groups = []
    for index in range(num_groups):
        firsts = [start + sum(share[:index]) for start, share in zip(_starts(sizes), shares, strict=True)]
        groups.append(
            tuple(range(first, first + share[index]) for first, share in zip(firsts, shares, strict=True))
        )
    return tuple(groups)


def _num_groups(num_heads: int, token_sizes: tuple[int, ...], row_bytes: int) -> int:
    """Return the same number on every rank: by the fullest rank's share, not by this one's."""
    heads = split_sizes(num_heads, len(token_sizes))[0]
    received = row_bytes * heads * (sum(token_sizes) - max(token_sizes))
    return max(1, min(MAX_GROUPS, heads, received // GROUP_BYTES))


@dataclass(frozen=True)
class _Exchange:
    """Both ways between tokens and heads, for one attention.

    Args:
        token_sizes: Tokens on each rank.
        rank: This rank.
        group: The ranks.
        overlapped: Whether something else is computed before a transfer is waited for.
    """

    token_sizes: tuple[int, ...]
    rank: int
    group: dist.ProcessGroup
    overlapped: bool

    def tokens_to_heads(
        self, tensors: tuple[torch.Tensor, ...], heads: Heads
    ) -> tuple[Transfer, torch.Tensor]:
        """Start to send q, k, v ``[B, H, S_local, D]`` and return what arrives, ``[S, 3, B, h, D]``."""
        batch, _, num_local, head_dim = tensors[0].shape
        mine = len(heads[self.rank])
        received = tensors[0].new_empty(sum(self.token_sizes), 3, batch, mine, head_dim)
        row = 3 * batch * head_dim
        sent_sizes = [row * num_local * len(share) for share in heads]
        transfer = start_all_to_all(
            _packed(tensors, heads),
            sent_sizes,
            receive=received.view(-1),
            receive_sizes=[row * mine * size for size in self.token_sizes],
            group=self.group,
            overlapped=self.overlapped,
        )
        return transfer, received

    def heads_to_tokens(self, output: torch.Tensor, heads: Heads, target: torch.Tensor) -> Callable[[], None]:
        """Start to send ``output`` ``[S, B, h * D]``; the call returned ends with ``target`` filled.

        Args:
            output: This rank's heads, contiguous; empty if it has none.
            heads: The heads of each rank.
            target: ``[B, S_local, H, D]``.
        """
        batch, num_local, _, head_dim = target.shape
        row = batch * head_dim
        sizes = [row * num_local * len(share) for share in heads]
        returned = target.new_empty(sum(sizes))
        transfer = start_all_to_all(
            output.view(-1),
            [row * len(heads[self.rank]) * size for size in self.token_sizes],
            receive=returned,
            receive_sizes=sizes,
            group=self.group,
            overlapped=self.overlapped,
        )

        def finish() -> None:
            transfer.wait()
            _unpack(returned, heads, target)

        return finish


def _packed(tensors: tuple[torch.Tensor, ...], heads: Heads) -> torch.Tensor:
    """Return q, k, v ``[B, H, S_local, D]`` as one flat buffer, for each rank ``[S_local, 3, B, h, D]``."""
    batch, num_heads, num_local, head_dim = tensors[0].shape
    if num_heads % len(heads) == 0:
        first, size = heads[0].start, len(heads[0])
        packed = tensors[0].new_empty(len(heads), num_local, 3, batch, size, head_dim)
        for index, tensor in enumerate(tensors):
            chosen = tensor.unflatten(1, (len(heads), -1))[:, :, first : first + size]
            packed[:, :, index].copy_(chosen.permute(1, 3, 0, 2, 4))
        return packed.view(-1)
    blocks = [
        torch.stack([tensor[:, share.start : share.stop].permute(2, 0, 1, 3) for tensor in tensors], dim=1)
        for share in heads
    ]
    return torch.cat([block.view(-1) for block in blocks])


def _unpack(returned: torch.Tensor, heads: Heads, target: torch.Tensor) -> None:
    """Write what each rank computed, ``[S_local, B, h, D]``, to its heads of ``target``."""
    batch, num_local, num_heads, head_dim = target.shape
    if num_heads % len(heads) == 0:
        first, size = heads[0].start, len(heads[0])
        blocks = returned.view(len(heads), num_local, batch, size, head_dim)
        chosen = target.unflatten(2, (len(heads), -1))[:, :, :, first : first + size]
        chosen.copy_(blocks.permute(2, 1, 0, 3, 4))
        return
    parts = returned.split([num_local * batch * len(share) * head_dim for share in heads])
    for share, part in zip(heads, parts, strict=True):
        block = part.view(num_local, batch, len(share), head_dim)
        target[:, :, share.start : share.stop].copy_(block.transpose(0, 1))


def _widest(tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Return views with elements of 8 bytes where they can be had: a strided copy moves one at a time."""
    per_element = 8 // tensors[0].element_size()
    for tensor in tensors:
        numbers = (tensor.shape[-1], tensor.storage_offset(), *tensor.stride()[:-1])
        if tensor.stride(-1) != 1 or any(number % per_element for number in numbers):
            return tensors
    return tuple(tensor.view(torch.int64) for tensor in tensors)


def _starts(sizes: tuple[int, ...]) -> list[int]:
    return list(accumulate(sizes, initial=0))[:-1]
