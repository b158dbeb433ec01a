"""Host memory that gradients arrive in.

Each parameter has a landing of its own, where the first gradient of an optimizer step stays. Those of
further micro-batches pass through a staging ring, shared by all parameters and pinned like the
landings, and are added to the first one from there.

What this module does not do: it neither copies nor adds.
"""

from __future__ import annotations

import threading
from collections import deque

import torch

from .pinned_arena import HostRegion
from .segments import align, view_of_storage


def empty_like_gradient(gradient: torch.Tensor) -> torch.Tensor:
    """Return a meta tensor with the shape and strides that a copy of the gradient gets."""
    # Strides of an expanded or holey gradient do not matter: what preserve_format makes of it does.
    return torch.empty_like(gradient, device="meta")


def nbytes_of(tensor: torch.Tensor) -> int:
    """Return the bytes of the tensor's elements."""
    return tensor.numel() * tensor.dtype.itemsize


class Landing:
    """Host memory for one parameter's gradient, used again while nobody else holds it."""

    def __init__(self, region: HostRegion) -> None:
        self._memory = region.tensor(0, region.nbytes)
        self._storage = self._memory.untyped_storage()
        self._idle_count = self._use_count()

    def like(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return host memory of the gradient's shape."""
        shape = empty_like_gradient(gradient)
        if nbytes_of(shape) <= self._memory.numel() and self._use_count() == self._idle_count:
            return view_of_storage(self._storage, shape.dtype, 0, shape.size(), shape.stride())
        return torch.empty_strided(shape.size(), shape.stride(), dtype=shape.dtype, device="cpu")

    def _use_count(self) -> int:
        return torch._C._storage_Use_Count(self._storage._cdata)


class StagingRing:
    """A bounded ring of host bytes: taken in order by one thread, given back in order by another.

    Args:
        region: Its memory; nothing larger than that can be taken.
    """

    def __init__(self, region: HostRegion) -> None:
        self.capacity_bytes = region.nbytes
        self._memory = region.tensor(0, region.nbytes)
        self._storage = self._memory.untyped_storage()
        self._changed = threading.Condition()
        self._taken: deque[tuple[int, int]] = deque()

    def like(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return host memory of the gradient's shape, once there is room for it."""
        shape = empty_like_gradient(gradient)
        start = self._take(align(nbytes_of(shape)))
        offset = start // shape.dtype.itemsize
        return view_of_storage(self._storage, shape.dtype, offset, shape.size(), shape.stride())

    def give_back(self) -> None:
        """Return what was taken first."""
        with self._changed:
            self._taken.popleft()
            self._changed.notify_all()

    def _take(self, nbytes: int) -> int:
        assert nbytes <= self.capacity_bytes
        with self._changed:
            while (start := self._room_for(nbytes)) is None:
                self._changed.wait()
            self._taken.append((start, nbytes))
        return start

    def _room_for(self, nbytes: int) -> int | None:
        if not self._taken:
            return 0
        oldest = self._taken[0][0]
        end = sum(self._taken[-1])
        if end > oldest:
            if end + nbytes <= self.capacity_bytes:
                return end
            end = 0
        # Not up to the oldest byte: start and end would coincide, as in an empty ring.
        return end if end + nbytes < oldest else None
