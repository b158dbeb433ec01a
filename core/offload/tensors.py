"""How one parameter or buffer is made to point at the host or at the target.

A plain tensor keeps its identity: only its ``data`` is rebound, so an optimizer's reference stays
good. Two kinds cannot be rebound and are substituted in the module for the time of management: a
traceable wrapper subclass (its device is fixed when it is made, so the wrapper is rebuilt around
moved inner tensors) and an inference tensor (autograd refuses to save it). The original object
returns on ``restore``.

Known limit: a write through ``.data`` inside a forward leaves no trace that could be read without
comparing all bytes, so it is not carried back to the master of a streamed tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from typing_extensions import override

from ..errors import OffloadError
from .segments import Layout
from .wrappers import take_apart

if TYPE_CHECKING:
    from .buckets import Bucket, Segment


@dataclass(eq=False)
class Entry:
    """One place in the model where a tensor is registered."""

    module: nn.Module
    tensors: dict[str, Any]
    name: str
    path: str
    is_parameter: bool

    def put(self, tensor: torch.Tensor) -> None:
        """Set the entry without telling the engine."""
        dict.__setitem__(self.tensors, self.name, tensor)


class ManagedTensor:
    """Base of both kinds.

    Attributes:
        tensor: The object that the model was given.
        key: Its ``id``.
        entries: Where it is registered; more than one for tied weights.
        is_trainable: Whether it required a gradient when it came under management.
        places: Segment and layout of each plain tensor inside it.
    """

    def __init__(self, tensor: torch.Tensor, entries: list[Entry]) -> None:
        self.tensor = tensor
        self.key = id(tensor)
        self.entries = entries
        self.original_device = tensor.device
        self.is_trainable = tensor.requires_grad
        self.places: list[tuple[Segment, Layout]] = []
        self.host_views: list[torch.Tensor] = []
        # Bumped when the master got other bytes without the tensor's own version knowing.
        self.generation = 0

    @property
    def path(self) -> str:
        """Dotted path of the first registration."""
        return self.entries[0].path if self.entries else "(replaced)"

    @property
    def bucket(self) -> Bucket:
        """What it moves with."""
        bucket = self.places[0][0].bucket
        assert bucket is not None
        return bucket

    def leaves(self) -> list[torch.Tensor]:
        """Return the plain tensors that hold the bytes."""
        raise NotImplementedError

    def attach(self) -> None:
        """Point at the masters, for the first time."""
        self.host_views = [layout.view(segment.host.untyped_storage()) for segment, layout in self.places]

    def bind(self, storage: torch.UntypedStorage) -> None:
        """Point at the target: ``storage`` is the slot that holds the bucket."""
        raise NotImplementedError

    def unbind(self) -> list[tuple[Segment, torch.Tensor | None]]:
        """Point at the masters again.

        Returns:
            The segments that changed; with the tensor that replaced the content, if one did.
        """
        raise NotImplementedError

    def restore(self) -> None:
        """Point at memory on the device that the tensor came from; a gradient goes along."""
        raise NotImplementedError

    def version(self) -> int:
        """Return a number that grows with every change of content that autograd knows of."""
        raise NotImplementedError

    def is_intact(self) -> bool:
        """Return whether the tensor still points at its master."""
        raise NotImplementedError

    def _views(self, storage: torch.UntypedStorage) -> list[torch.Tensor]:
        return [layout.view(storage, segment.offset_bytes) for segment, layout in self.places]


class PlainTensor(ManagedTensor):
    """A tensor whose ``data`` is rebound."""

    def __init__(self, tensor: torch.Tensor, entries: list[Entry]) -> None:
        super().__init__(tensor, entries)
        self._bound_version = 0
        self._bound_address = 0
        self._host_address = 0

    @override
    def leaves(self) -> list[torch.Tensor]:
        return [self.tensor]

    @override
    def attach(self) -> None:
        super().attach()
        self._host_address = self.host_views[0].data_ptr()
        set_data(self.tensor, self.host_views[0])

    @override
    def bind(self, storage: torch.UntypedStorage) -> None:
        view = self._views(storage)[0]
        set_data(self.tensor, view)
        self._bound_version = self.tensor._version
        self._bound_address = view.data_ptr()

    @override
    def unbind(self) -> list[tuple[Segment, torch.Tensor | None]]:
        segment, layout = self.places[0]
        if self.tensor.data_ptr() != self._bound_address or not layout.fits(self.tensor):
            if not layout.fits(self.tensor):
                return []  # other bytes altogether: taken in at the next use
            replaced = self.tensor.detach()
            set_data(self.tensor, self.host_views[0])
            return [(segment, replaced)]
        changed = self.tensor._version != self._bound_version or self._may_be_written_unmarked()
        set_data(self.tensor, self.host_views[0])
        return [(segment, None)] if changed else []

    @override
    def restore(self) -> None:
        device = self.original_device
        if self._has_moved() or not self.is_intact():
            if self.tensor.device != device:
                set_data_and_gradient(self.tensor, self.tensor.detach().to(device))
        elif device.type != "cpu":
            segment, layout = self.places[0]
            set_data_and_gradient(self.tensor, layout.view(segment.on_device(device).untyped_storage()))

    @override
    def version(self) -> int:
        return self.tensor._version + self.generation

    @override
    def is_intact(self) -> bool:
        if self._has_moved():
            raise OffloadError(
                f"The memory of {self.path} was put elsewhere (by share_memory() or by sending it to another "
                "process), so what is copied to the target would be out of date. Send a clone, or attach the "
                "OffloadTrainingManager afterwards."
            )
        return self.tensor.data_ptr() == self._host_address and self.places[0][1].fits(self.tensor)

    def _has_moved(self) -> bool:
        # Sharing a storage exchanges the memory under everything that uses it, the master's views included.
        return self.host_views[0].data_ptr() != self._host_address

    def take_in(self, value: torch.Tensor) -> None:
        """Make ``value`` (of the same layout) the master's content."""
        self.host_views[0].copy_(value)
        self.generation += 1
        set_data(self.tensor, self.host_views[0])

    def _may_be_written_unmarked(self) -> bool:
        # Batch normalisation writes running statistics that its schema does not mark as written, so
        # their version stays. They are one-dimensional floats, and only training mode writes them.
        if self.tensor.dim() != 1 or not self.tensor.is_floating_point():
            return False
        return any(not entry.is_parameter and entry.module.training for entry in self.entries)


class SubstitutedTensor(ManagedTensor):
    """A tensor that another object stands for while it is managed."""

    def __init__(self, tensor: torch.Tensor, entries: list[Entry]) -> None:
        super().__init__(tensor, entries)
        self._leaves, self._rebuild = take_apart(tensor)
        self._devices = [leaf.device for leaf in self._leaves]
        self._bound: list[torch.Tensor] = []
        self._bound_versions: list[int] = []
        self._host_object = tensor
        self._written = 0

    @override
    def leaves(self) -> list[torch.Tensor]:
        return self._leaves

    @override
    def attach(self) -> None:
        super().attach()
        for leaf, view in zip(self._leaves, self.host_views, strict=True):
            set_data(leaf, view)
        self._host_object = self._make(self.host_views)
        self._put(self._host_object)

    @override
    def bind(self, storage: torch.UntypedStorage) -> None:
        self._bound = self._views(storage)
        self._bound_versions = [view._version for view in self._bound]
        self._put(self._make(self._bound))

    @override
    def unbind(self) -> list[tuple[Segment, torch.Tensor | None]]:
        changed: list[tuple[Segment, torch.Tensor | None]] = []
        for (segment, _), view, version in zip(self.places, self._bound, self._bound_versions, strict=True):
            if view._version != version:
                changed.append((segment, None))
                self._written += 1
        self._bound = []
        self._put(self._host_object)
        return changed

    @override
    def restore(self) -> None:
        for leaf, device, (segment, layout) in zip(self._leaves, self._devices, self.places, strict=True):
            if device.type != "cpu":
                set_data(leaf, layout.view(segment.on_device(device).untyped_storage()))
        self._put(self.tensor)

    @override
    def version(self) -> int:
        return sum(view._version for view in self.host_views) + self._written + self.generation

    @override
    def is_intact(self) -> bool:
        return True

    def _make(self, leaves: Sequence[torch.Tensor]) -> torch.Tensor:
        with torch.inference_mode(False):
            rebuilt = self._rebuild(leaves)
            if isinstance(self.tensor, nn.Parameter):
                return nn.Parameter(rebuilt, requires_grad=False)
            return rebuilt

    def _put(self, tensor: torch.Tensor) -> None:
        for entry in self.entries:
            entry.put(tensor)


def make_managed(tensor: torch.Tensor, entries: list[Entry]) -> PlainTensor | SubstitutedTensor:
    """Return the right kind for ``tensor``."""
    if is_traceable_wrapper_subclass(tensor) or tensor.is_inference():
        return SubstitutedTensor(tensor, entries)
    return PlainTensor(tensor, entries)


def set_data(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Rebind ``tensor`` to the memory of ``value``; identity, version and autograd state stay.

    One of another device or dtype, which somebody moved, is an inference tensor no more.
    """
    if tensor.is_inference() and (tensor.device, tensor.dtype) == (value.device, value.dtype):
        with torch.inference_mode(), torch._C.DisableTorchFunctionSubclass():
            tensor.set_(value.untyped_storage(), value.storage_offset(), value.size(), value.stride())
        return
    if type(tensor) in (torch.Tensor, nn.Parameter) and not torch.is_inference_mode_enabled():
        tensor.data = value
        return
    with torch.inference_mode(False), torch._C.DisableTorchFunctionSubclass():
        tensor.data = value


def set_data_and_gradient(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Rebind ``tensor`` and bring its gradient, if it has one, to the same device."""
    gradient = tensor.grad if tensor.is_leaf else None
    if gradient is None or gradient.device == value.device:
        set_data(tensor, value)
        return
    tensor.grad = None
    set_data(tensor, value)
    tensor.grad = gradient.to(value.device)
