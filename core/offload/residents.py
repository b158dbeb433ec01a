"""The resident set: tensors that stay on the target for good.

These are the trainable parameters while the optimizer is not offloaded, whatever shares memory with
them, and buffers that a forward replaced by a tensor of its own (*loose* ones, which stay the
model's business and are only counted).

What this module does not do: it streams nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .buckets import Segment
from .module_dicts import ManagedDict
from .segments import Layout, extent_bytes, raw_bytes
from .tensors import Entry, ManagedTensor, PlainTensor, set_data_and_gradient
from .transfer import Transfer


@dataclass(eq=False)
class _Moved:
    """One tensor that was moved, and where to."""

    tensor: PlainTensor
    layout: Layout
    flat: torch.Tensor
    address: int

    def is_intact(self) -> bool:
        return self.tensor.tensor.data_ptr() == self.address and self.layout.fits(self.tensor.tensor)


class ResidentSet:
    """Move tensors to the target, count them, and bring them back."""

    def __init__(self, transfer: Transfer) -> None:
        self._transfer = transfer
        self._segment_bytes = 0
        self._moved: list[_Moved] = []
        self._tensors: dict[int, ManagedTensor] = {}
        self._loose: dict[tuple[int, str], tuple[ManagedDict, torch.device]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the set on the target."""
        target = self._transfer.device
        loose = [dict.get(holder, name) for (_, name), (holder, _) in self._loose.items()]
        loose_bytes = sum(
            tensor.numel() * tensor.dtype.itemsize
            for tensor in {id(tensor): tensor for tensor in loose if tensor is not None}.values()
            if tensor.device == target
        )
        return self._segment_bytes + loose_bytes

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether this very tensor is in the set."""
        known = self._tensors.get(id(tensor))
        return known is not None and known.tensor is tensor

    def add(self, segment: Segment) -> None:
        """Move one segment to the target, unless it is there."""
        self._segment_bytes += _content_bytes(segment)
        for tensor in segment.tensors:
            self._tensors[id(tensor.tensor)] = tensor
        if all(tensor.original_device == self._transfer.device for tensor in segment.tensors):
            return
        flat = self._transfer.allocate(segment.nbytes)
        for tensor in segment.tensors:
            assert isinstance(tensor, PlainTensor)
            layout = next(layout for place, layout in tensor.places if place is segment)
            start = layout.offset_bytes
            self._transfer.move_resident(
                raw_bytes(tensor.tensor), flat[start : start + extent_bytes(tensor.tensor)]
            )
            view = layout.view(flat.untyped_storage())
            set_data_and_gradient(tensor.tensor, view)
            self._moved.append(_Moved(tensor, layout, flat, view.data_ptr()))

    def add_loose(self, holder: ManagedDict, name: str, original_device: torch.device) -> None:
        """Count a buffer that the model replaced by itself."""
        self._loose[(id(holder), name)] = (holder, original_device)

    def forget_entry(self, holder: ManagedDict, name: str, value: torch.Tensor | None) -> torch.device | None:
        """Note that an entry no longer holds ``value``.

        Returns:
            The original device of what the entry held, if that was in the set.
        """
        loose = self._loose.pop((id(holder), name), None)
        if loose is not None:
            return loose[1]
        if value is None or not self.holds(value):
            return None
        managed = self._tensors[id(value)]
        managed.entries = [e for e in managed.entries if not (e.tensors is holder and e.name == name)]
        if not managed.entries:
            self._release(managed)
        return managed.original_device

    def add_entry(self, entry: Entry, value: torch.Tensor) -> None:
        """Note that a tensor of the set is registered at one more place."""
        self._tensors[id(value)].entries.append(entry)

    def _release(self, managed: ManagedTensor) -> None:
        del self._tensors[managed.key]
        self._moved = [moved for moved in self._moved if moved.tensor is not managed]
        for segment in {id(segment): segment for segment, _ in managed.places}.values():
            nbytes = _content_bytes(segment)
            segment.tensors.remove(managed)
            self._segment_bytes -= nbytes - (_content_bytes(segment) if segment.tensors else 0)

    def restore(self) -> None:
        """Bring everything back to the device that it came from."""
        returned: dict[int, torch.Tensor] = {}
        for moved in self._moved:
            device = moved.tensor.original_device
            if moved.is_intact():
                flat = returned.setdefault(id(moved.flat), moved.flat.to(device))
                set_data_and_gradient(moved.tensor.tensor, moved.layout.view(flat.untyped_storage()))
            elif moved.tensor.tensor.device != device:
                set_data_and_gradient(moved.tensor.tensor, moved.tensor.tensor.detach().to(device))
        for (_, name), (holder, device) in self._loose.items():
            tensor = dict.get(holder, name)
            if tensor is not None and tensor.device != device:
                dict.__setitem__(holder, name, tensor.to(device))
        self._moved.clear()
        self._loose.clear()
        self._tensors.clear()
        self._segment_bytes = 0


def _content_bytes(segment: Segment) -> int:
    # The segment may start a little early, for alignment's sake.
    first = min(
        layout.offset_bytes for t in segment.tensors for place, layout in t.places if place is segment
    )
    return segment.nbytes - first
