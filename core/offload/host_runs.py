"""Runs of bytes that lie in one storage as they do in a block, each to be moved by one copy."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .segments import ALIGNMENT_BYTES, extent_bytes, view_of_storage


@dataclass
class HostRun:
    """Bytes that lie in one storage as they do in the block."""

    storage: torch.UntypedStorage
    first: int  # byte of the storage
    place: int  # byte of the block
    nbytes: int

    @property
    def bytes(self) -> torch.Tensor:
        """Return them where they are, uint8."""
        return view_of_storage(self.storage, torch.uint8, self.first, (self.nbytes,), (1,))


def add_run(runs: list[HostRun], leaf: torch.Tensor, place: int) -> None:
    """Add a tensor's bytes, to the last run if they follow it there as they do in the block."""
    nbytes = extent_bytes(leaf)
    if not nbytes:
        return
    storage = leaf.untyped_storage()
    first = int(leaf.storage_offset()) * leaf.dtype.itemsize
    last = runs[-1] if runs else None
    if last is not None and last.storage.data_ptr() == storage.data_ptr():
        distance = place - last.place
        if first - last.first == distance and last.nbytes <= distance < last.nbytes + ALIGNMENT_BYTES:
            last.nbytes = distance + nbytes
            return
    runs.append(HostRun(storage, first, place, nbytes))
