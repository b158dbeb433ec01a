"""Shard, attend and gather by hand: for models whose sharding depends on their data.

A plan says beforehand where a model is cut. A model author whose cuts depend on what the model sees
calls these three functions instead, in the model's own forward:

    tokens = shard(tokens, group=group)
    mixed = attend(q, k, v, lengths=(length,), group=group)
    tokens = gather(tokens, length, group=group)

Parts are uneven where lengths do not divide, and may be empty. Lengths are those of the whole sequence,
which every rank knows, so no call waits for the host. Exchanges have no backward: with gradients on,
``attend`` and ``gather`` raise instead of losing what other ranks would send back.

Idea: ``sp_shard`` and ``sp_gather`` of vLLM-Omni; there lengths must divide, or are padded.

Shapes: ``B`` batch, ``H`` heads, ``D`` head dim, ``S_local`` tokens of this rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

from ..errors import PlanError
from .attention.local import AttentionCall
from .attention.masks import MaskMemo
from .attention.unified import sequence_attention
from .collectives import all_gather
from .mesh import SequenceGroup
from .sequence import Stream, joint_sizes, split_sizes


def shard(tensor: torch.Tensor, dim: int = 1, *, group: SequenceGroup) -> torch.Tensor:
    """Return this rank's part of a whole tensor, in memory of its own; no communication.

    Args:
        tensor: The same on every rank.
        dim: The dim to cut.
        group: The ranks that share it.
    """
    stream = _stream(tensor.shape[dim], group)
    part = tensor.narrow(dim, stream.start, stream.local_length)
    return part.clone(memory_format=torch.contiguous_format)


def gather(tensor: torch.Tensor, length: int, dim: int = 1, *, group: SequenceGroup) -> torch.Tensor:
    """Return the whole tensor on every rank; all ranks of ``group`` must call. Inverse of ``shard``.

    Args:
        tensor: This rank's part.
        length: Length of the whole in ``dim``.
        dim: The dim that was cut.
        group: The ranks that share it.

    Raises:
        PlanError: If the part is not this rank's of a tensor of that length.
    """
    stream = _stream(length, group)
    if tensor.shape[dim] != stream.local_length:
        raise PlanError(
            f"a part of {tensor.shape[dim]} rows was to be gathered, but this rank has "
            f"{stream.local_length} of the {length}"
        )
    whole = all_gather(tensor.movedim(dim, 0), stream.sizes, group=group.whole)
    return whole.movedim(0, dim).contiguous()


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    lengths: tuple[int, ...],
    group: SequenceGroup,
    mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """Attend over the whole sequence by Ulysses, Ring or both; all ranks of ``group`` must call.

    Args:
        q: ``[B, H, S_local, D]`` of this rank's tokens; ``k`` and ``v`` alike.
        k: Likewise.
        v: Likewise.
        lengths: Whole lengths of the sequences that were sharded each by itself and then joined on every
            rank, in that order: one number, or for example text and image.
        group: The ranks.
        mask: Whole mask ``[..., 1 | S, S]`` with the sequences one after the other, bool (True attends) or
            added; the same on every rank.
        scale: Of the scores; None is ``D ** -0.5``.

    Returns:
        ``[B, H, S_local, D]``.

    Raises:
        PlanError: If the tensors or the mask do not fit the lengths.
    """
    streams = tuple(_stream(length, group, name) for name, length in enumerate(lengths))
    sizes = joint_sizes(streams)
    rank = dist.get_rank(group.whole)
    for tensor in (q, k, v):
        if tensor.shape[2] != sizes[rank]:
            raise PlanError(
                f"{tensor.shape[2]} tokens were given, but this rank has {sizes[rank]} of {lengths}"
            )
    call = AttentionCall(_plain_backend, q, k, v, None, True, {} if scale is None else {"scale": scale})
    if mask is not None:
        mask = MaskMemo(group.whole).from_whole(mask, streams)
    return call.as_asked(sequence_attention(call, token_sizes=sizes, mask=mask, group=group))


def _plain_backend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _: int, *, mask: torch.Tensor | None, **options: Any
) -> torch.Tensor:
    if mask is not None and mask.ndim == 3:
        mask = mask.unsqueeze(1)
    output = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=options.get("scale"))
    return output.transpose(1, 2).flatten(2)


def _stream(length: int, group: SequenceGroup, name: object = "sequence") -> Stream:
    sizes = split_sizes(length, dist.get_world_size(group.whole))
    return Stream(str(name), sizes, dist.get_rank(group.whole))
