"""Parts of larger tensors in host memory, without a copy there.

A rank of a tensor-parallel model holds some rows or columns of a weight, which lie apart in the whole weight
that all ranks read. A *stand-in* has the part's shape and dtype, and memory that is reserved but never
touched, so it takes none; its bytes are found by ``copies``, strip by strip in the whole tensor.

What this module does not do: it copies nothing and knows no rank.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from .segments import raw_bytes, view_of_storage
from .wrappers import take_apart

_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)


@dataclass(frozen=True)
class _Strip:
    """Columns of a part's bytes, seen as a matrix.

    Attributes:
        source: Where they are, uint8 ``[rows, columns]``, any distance between rows.
        first: The strip's first column in the part.
    """

    source: torch.Tensor
    first: int


class HostParts:
    """Stand-ins for parts of tensors, and where their bytes are."""

    def __init__(self) -> None:
        # By the stand-in's address, which survives whatever is wrapped around it.
        self._strips: dict[int, tuple[torch.Tensor, list[_Strip]]] = {}

    def stand_in(self, pieces: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
        """Return a tensor that stands for a part, contiguous, its content undefined.

        Args:
            pieces: What it is made of, one behind the other in ``dim``; on the CPU, each contiguous or a run
                in that dim of a contiguous tensor. They are kept alive.
            dim: Which dim is cut.

        Raises:
            ValueError: If a piece is something else, or the part is empty.
        """
        size = list(pieces[0].shape)
        size[dim] = sum(piece.shape[dim] for piece in pieces)
        dtype = pieces[0].dtype
        num_bytes = torch.Size(size).numel() * dtype.itemsize
        if not num_bytes:
            raise ValueError(f"no part of no elements ({size})")
        with torch.inference_mode(False):
            memory = torch.frombuffer(mmap.mmap(-1, num_bytes, flags=_FLAGS), dtype=torch.uint8)
            strips, reached = [], 0
            for piece in pieces:
                strips.append(_Strip(_as_rows(piece, dim), reached))
                reached += strips[-1].source.shape[1]
            part = memory.view(dtype).view(size)
        self._strips[part.data_ptr()] = (memory, strips)
        return part

    def holds(self, leaf: torch.Tensor) -> bool:
        """Return whether a plain tensor stands for a part."""
        return leaf.data_ptr() in self._strips

    def copies(
        self, leaf: torch.Tensor, destination: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield what to copy for a part to be in memory: a source and a target, uint8 ``[rows, columns]``.

        Args:
            leaf: A stand-in, or a tensor over its memory.
            destination: Where the part's bytes go, uint8 ``[n]``.
        """
        _, strips = self._strips[leaf.data_ptr()]
        rows = destination.view(strips[0].source.shape[0], -1)
        for strip in strips:
            yield strip.source, rows.narrow(1, strip.first, strip.source.shape[1])

    def filled(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor, or one like it with the bytes that its stand-ins stand for."""
        leaves, rebuild = take_apart(tensor)
        if not any(self.holds(leaf) for leaf in leaves):
            return tensor
        return rebuild([self._read(leaf) for leaf in leaves])

    def _read(self, leaf: torch.Tensor) -> torch.Tensor:
        if not self.holds(leaf):
            return leaf
        made = torch.empty_like(leaf, memory_format=torch.contiguous_format)
        for source, target in self.copies(leaf, raw_bytes(made)):
            target.copy_(source)
        return made


def _as_rows(piece: torch.Tensor, dim: int) -> torch.Tensor:
    """Return the bytes of a piece as a matrix: a row for each place in the dims before ``dim``."""
    num_rows = piece.shape[:dim].numel()
    columns = piece.numel() // max(1, num_rows)
    distance = piece.stride(dim - 1) if dim else columns
    expected = piece.new_empty(piece.shape[dim:], device="meta").stride()
    steps = [piece.stride(each) for each in range(dim)]
    nested = all(
        step == piece.stride(each + 1) * piece.shape[each + 1] for each, step in enumerate(steps[:-1])
    )
    if piece.stride()[dim:] != expected or not nested or piece.device.type != "cpu":
        raise ValueError(f"no run of a contiguous tensor: {tuple(piece.shape)}, strides {piece.stride()}")
    size = piece.dtype.itemsize
    first = int(piece.storage_offset()) * size
    shape, stride = (num_rows, columns * size), (distance * size, 1)
    return view_of_storage(piece.untyped_storage(), torch.uint8, first, shape, stride)
