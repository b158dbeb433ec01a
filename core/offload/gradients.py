"""Gradients of trainable parameters whose home is the host.

While the optimizer is offloaded a parameter's ``grad`` is on the host before and after every
backward, so an optimizer, gradient clipping and any number of accumulation steps see one device. In
between: just before autograd accumulates, the host gradient is put aside; just after, the new one
starts its way to the host; at the end of the backward the two are added there.

What this module does not do: it moves no weights.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from .pinned_arena import HostRegion
from .segments import view_of_storage
from .tensors import PlainTensor, set_data
from .transfer import Transfer


@dataclass(eq=False)
class _Arriving:
    """Gradients of one parameter in one backward, in the order in which they must be added."""

    tensor: PlainTensor
    parts: list[torch.Tensor] = field(default_factory=list)


class _Landing:
    """Host memory for one parameter's gradient, used again while nobody else holds it."""

    def __init__(self, region: HostRegion) -> None:
        self._memory = region.tensor(0, region.nbytes)
        self._storage = self._memory.untyped_storage()
        self._idle_count = self._use_count()

    def like(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return host memory of the gradient's shape."""
        # Strides of an expanded or holey gradient do not matter: what preserve_format makes of it does.
        shape = torch.empty_like(gradient, device="meta")
        nbytes = shape.numel() * shape.dtype.itemsize
        if nbytes <= self._memory.numel() and self._use_count() == self._idle_count:
            return view_of_storage(self._storage, shape.dtype, 0, shape.size(), shape.stride())
        return torch.empty_strided(shape.size(), shape.stride(), dtype=shape.dtype, device="cpu")

    def _use_count(self) -> int:
        return torch._C._storage_Use_Count(self._storage._cdata)


class HostGradients:
    """Watch trainable parameters and bring their gradients home.

    Args:
        transfer: Does the copies.
        on_backward: Called whenever a hook runs inside a backward, so that its end is noticed.
    """

    def __init__(self, transfer: Transfer, *, on_backward: Callable[[], object]) -> None:
        self._transfer = transfer
        self._on_backward = on_backward
        self._arriving: dict[int, _Arriving] = {}
        self._landings: dict[int, _Landing] = {}
        self._handles: list[tuple[PlainTensor, list]] = []

    def watch(self, tensor: PlainTensor, region: HostRegion) -> None:
        """Take charge of one parameter's gradient; ``region`` is where it lands."""
        parameter = tensor.tensor
        if parameter.grad is not None and parameter.grad.device.type != "cpu":
            _set_gradient(tensor, parameter.grad.to("cpu"))
        self._landings[id(parameter)] = _Landing(region)
        # Weak, because the garbage collector does not see into a tensor's hooks.
        references = weakref.ref(self), weakref.ref(tensor)
        handles = [
            parameter.register_hook(functools.partial(_before_accumulation, *references)),
            parameter.register_post_accumulate_grad_hook(functools.partial(_after_accumulation, *references)),
        ]
        self._handles.append((tensor, handles))

    def finish(self) -> None:
        """Add up what has arrived and give every parameter its gradient."""
        if not self._arriving:
            return
        self._transfer.finish_gradients()
        arriving, self._arriving = self._arriving, {}
        for entry in arriving.values():
            total = functools.reduce(_add, entry.parts) if entry.parts else None
            _set_gradient(entry.tensor, total)

    def remove(self) -> None:
        """Finish, and take every hook off."""
        self.finish()
        for tensor, handles in self._handles:
            for handle in handles:
                handle.remove()
            _drop_empty_hook_dicts(tensor.tensor)
        self._handles.clear()

    def put_aside(self, tensor: PlainTensor) -> None:
        """Keep the host gradient out of autograd's reach while a new one comes."""
        self._on_backward()
        entry = self._entry(tensor)
        if tensor.tensor.grad is not None:
            entry.parts.append(tensor.tensor.grad)
            tensor.tensor.grad = None

    def send_home(self, tensor: PlainTensor) -> None:
        """Start the new gradient's way to the host."""
        self._on_backward()
        gradient = tensor.tensor.grad
        if gradient is not None:
            tensor.tensor.grad = None
            self._entry(tensor).parts.append(self._send(tensor, gradient))

    def _entry(self, tensor: PlainTensor) -> _Arriving:
        return self._arriving.setdefault(id(tensor.tensor), _Arriving(tensor))

    def _send(self, tensor: PlainTensor, gradient: torch.Tensor) -> torch.Tensor:
        if gradient.device != self._transfer.device:
            # Autograd copied it to where the parameter is, as it does when it cannot take the gradient over.
            return gradient
        if gradient.requires_grad or gradient.layout != torch.strided or type(gradient) is not torch.Tensor:
            self._transfer.moved_to_host_bytes += gradient.numel() * gradient.dtype.itemsize
            return gradient.to("cpu")
        with torch.no_grad():
            host = self._landings[id(tensor.tensor)].like(gradient)
            self._transfer.send_gradient(gradient, host)
        return host


_Owner = weakref.ref[HostGradients]
_Tensor = weakref.ref[PlainTensor]


def _before_accumulation(owner: _Owner, tensor: _Tensor, gradient: torch.Tensor) -> None:
    gradients, managed = owner(), tensor()
    if gradients is not None and managed is not None:
        gradients.put_aside(managed)


def _after_accumulation(owner: _Owner, tensor: _Tensor, parameter: torch.Tensor) -> None:
    gradients, managed = owner(), tensor()
    if gradients is not None and managed is not None:
        gradients.send_home(managed)


def _add(total: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    if total.requires_grad or part.requires_grad:
        with torch.enable_grad():
            return total + part
    with torch.no_grad():
        if total.layout != part.layout:
            return part + total if total.layout != torch.strided else total + part
        return total.add_(part)


def _set_gradient(tensor: PlainTensor, gradient: torch.Tensor | None) -> None:
    parameter = tensor.tensor
    if gradient is None or parameter.device == gradient.device:
        parameter.grad = gradient
        return
    # A gradient may be set only while the parameter is on its device.
    present = parameter.detach()
    parameter.grad = None
    set_data(parameter, tensor.host_views[0])
    parameter.grad = gradient
    set_data(parameter, present)


def _drop_empty_hook_dicts(parameter: torch.Tensor) -> None:
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        hooks = getattr(parameter, name)
        if hooks is not None and not hooks:
            setattr(parameter, name, None)
