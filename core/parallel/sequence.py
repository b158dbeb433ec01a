"""Cut token sequences over ranks, unevenly where they do not divide, and join them again.

A *stream* is one token sequence (text, image). A joint sequence is several streams one after the
other. Each rank holds ``[text_r, image_r]``, so a joint sequence that is collected rank after rank is
a permutation of the *canonical* order ``[text, image]``; call that *rank-major* order.

A rank whose part of a stream is empty carries one *phantom* token of zeros instead: many models
reshape with ``view(B, 0, heads, -1)``, which is ambiguous. A phantom never enters a collective.

Shapes: ``S`` tokens of the whole sequence, ``P`` ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from ..errors import PlanError


def split_sizes(total: int, num_parts: int) -> tuple[int, ...]:
    """Return ``num_parts`` sizes that add up to ``total`` and differ by at most one, larger first."""
    size, remainder = divmod(total, num_parts)
    return tuple(size + (part < remainder) for part in range(num_parts))


@dataclass(frozen=True)
class Stream:
    """One token sequence, cut over the ranks of a group.

    Args:
        name: The plan's name for it.
        sizes: Tokens on each rank.
        rank: This rank.
    """

    name: str
    sizes: tuple[int, ...]
    rank: int

    @cached_property
    def length(self) -> int:
        """Tokens on all ranks together."""
        return sum(self.sizes)

    @cached_property
    def start(self) -> int:
        """Index in the whole stream of this rank's first token."""
        return sum(self.sizes[: self.rank])

    @cached_property
    def local_length(self) -> int:
        """Tokens on this rank; may be 0."""
        return self.sizes[self.rank]

    @cached_property
    def stop(self) -> int:
        """Index in the whole stream one past this rank's last token."""
        return self.start + self.local_length

    @cached_property
    def carried_length(self) -> int:
        """Rows of this rank's tensors: its tokens, or one phantom if it has none."""
        return max(1, self.local_length)


Streams = tuple[Stream, ...]


def joint_sizes(streams: Streams) -> tuple[int, ...]:
    """Return the tokens of the joint sequence on each rank, without phantoms."""
    return tuple(sum(sizes) for sizes in zip(*(stream.sizes for stream in streams), strict=True))


def take(tensor: torch.Tensor, streams: Streams, dim: int) -> torch.Tensor:
    """Return this rank's part of a whole tensor, phantoms included, in memory of its own.

    Args:
        tensor: ``[..., S, ...]`` in canonical order, ``S`` at ``dim``.
        streams: The streams that ``dim`` is made of, in their canonical order.
        dim: The token dim.

    Returns:
        ``[..., carried, ...]``, contiguous. It owns its memory because blocks write in place, and a
        view would keep the whole tensor alive.

    Raises:
        PlanError: If ``dim`` is not as long as the streams.
    """
    check_length(tensor, streams, dim, expected=sum(stream.length for stream in streams), what="whole")
    pieces: list[torch.Tensor] = []
    offset = 0
    for stream in streams:
        if stream.local_length:
            pieces.append(tensor.narrow(dim, offset + stream.start, stream.local_length))
        else:
            pieces.append(_phantom(tensor, dim))
        offset += stream.length
    if len(pieces) == 1:
        return pieces[0].clone(memory_format=torch.contiguous_format)
    return torch.cat(pieces, dim)


def drop_phantoms(tensor: torch.Tensor, streams: Streams, dim: int) -> torch.Tensor:
    """Return a rank's tensor ``[..., carried, ...]`` without its phantom rows.

    Raises:
        PlanError: If ``dim`` is not this rank's length.
    """
    check_carried(tensor, streams, dim)
    if all(stream.local_length for stream in streams):
        return tensor
    return torch.cat(_real_pieces(tensor, streams, dim), dim)


def restore_phantoms(tensor: torch.Tensor, streams: Streams, dim: int) -> torch.Tensor:
    """Inverse of ``drop_phantoms``; the phantom rows are zeros."""
    if all(stream.local_length for stream in streams):
        return tensor
    pieces: list[torch.Tensor] = []
    offset = 0
    for stream in streams:
        if stream.local_length:
            pieces.append(tensor.narrow(dim, offset, stream.local_length))
        else:
            pieces.append(_phantom(tensor, dim))
        offset += stream.local_length
    return torch.cat(pieces, dim)


def to_canonical(tensor: torch.Tensor, streams: Streams, dim: int) -> torch.Tensor:
    """Return a whole tensor in canonical order, given it in rank-major order.

    Args:
        tensor: ``[..., S, ...]``, ``S`` at ``dim``.
        streams: The streams of the joint sequence.
        dim: The token dim.
    """
    if len(streams) == 1:
        return tensor
    num_ranks = len(streams[0].sizes)
    sizes = [stream.sizes[rank] for rank in range(num_ranks) for stream in streams]
    pieces = tensor.split(sizes, dim)
    return torch.cat([piece for index in range(len(streams)) for piece in pieces[index :: len(streams)]], dim)


def rank_major_order(streams: Streams, device: torch.device) -> torch.Tensor:
    """Return canonical indices ``[S]`` (int64, on ``device``) listed in rank-major order."""
    offsets = [sum(stream.length for stream in streams[:index]) for index in range(len(streams))]
    canonical = [
        torch.arange(offset, offset + stream.length, device=device).split(list(stream.sizes))
        for offset, stream in zip(offsets, streams, strict=True)
    ]
    return torch.cat([piece for pieces in zip(*canonical, strict=True) for piece in pieces])


def check_carried(tensor: torch.Tensor, streams: Streams, dim: int) -> None:
    """Check that ``dim`` of a rank's tensor is this rank's length.

    Raises:
        PlanError: If not, for example because the plan forgot to shard it.
    """
    expected = sum(stream.carried_length for stream in streams)
    check_length(tensor, streams, dim, expected=expected, what="this rank's")


def check_length(tensor: torch.Tensor, streams: Streams, dim: int, *, expected: int, what: str) -> None:
    """Check one dim of a tensor against a number of tokens.

    Raises:
        PlanError: If the tensor has no such dim or it has another length.
    """
    if -tensor.ndim <= dim < tensor.ndim and tensor.shape[dim] == expected:
        return
    names = " + ".join(f"{stream.name} ({stream.length} tokens)" for stream in streams)
    raise PlanError(
        f"a tensor of shape {tuple(tensor.shape)} does not fit {names}: "
        f"dim {dim} should have {what} length, {expected}"
    )


def _real_pieces(tensor: torch.Tensor, streams: Streams, dim: int) -> list[torch.Tensor]:
    carried = tensor.split([stream.carried_length for stream in streams], dim)
    return [piece.narrow(dim, 0, stream.local_length) for piece, stream in zip(carried, streams, strict=True)]


def _phantom(like: torch.Tensor, dim: int) -> torch.Tensor:
    shape = list(like.shape)
    shape[dim] = 1
    return like.new_zeros(shape)
