"""Gradients of trainable parameters whose home is the host.

While the optimizer is offloaded a parameter's ``grad`` is on the host before and after every
backward, so an optimizer, gradient clipping and any number of accumulation steps see one device. In
between: just before autograd accumulates, the host gradient is put aside; just after, the new one
starts its way to the host, on the direction of the link that weights do not use.

Sums are autograd's own: the gradient of micro-batch ``n`` is added, in place and in the order of the
backwards, to the sum of those before it. A worker thread adds it as soon as it has arrived, while the
backward goes on; at the end of the backward every sum is complete and every ``grad`` set.

What this module does not do: it moves no weights.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from ..errors import OffloadError
from .gradient_memory import Landing, StagingRing, nbytes_of
from .host_worker import HostWorker
from .pinned_arena import HostRegion
from .segments import align
from .tensors import PlainTensor, set_data
from .transfer import Arrival, Transfer

HOOKS_WAY_OUT = (
    "Use enable_optimizer_cpu_offload=False, register_hook() to look at gradients, or overlap_optimizer() to "
    "step in the backward"
)
# Staged gradients of a whole adapter fit; of larger models, at least two of the largest.
_STAGING_BYTES = 256 * 2**20


@dataclass(eq=False)
class Arriving:
    """The gradient of one parameter in one backward.

    Attributes:
        tensor: The parameter.
        total: The running sum on the host; the worker may be adding to it.
        arrival: When the last part that the worker gets is on the host.
        num_parts: How many gradients this backward has brought.
        has_additions: Whether the worker adds to ``total`` in this backward.
        later: What only the end of the backward can add, in order (sparse, differentiable, huge).
    """

    tensor: PlainTensor
    total: torch.Tensor | None = None
    arrival: Arrival | None = None
    num_parts: int = 0
    has_additions: bool = False
    later: list[torch.Tensor] = field(default_factory=list)


Observer = Callable[[Arriving], None]


class HostGradients:
    """Watch trainable parameters and bring their gradients home.

    Args:
        transfer: Does the copies.
        on_backward: Called whenever a hook runs inside a backward, so that its end is noticed.

    Attributes:
        worker: Adds what arrives; other work on gradients that it must follow goes there too.
        new_region: Gives more host memory like the landings'; set by the store.
        observer: Called in the backward, after a gradient was sent and its sum given to the worker.
        largest_bytes: The largest landing.
        total_bytes: All landings.
    """

    def __init__(self, transfer: Transfer, *, on_backward: Callable[[], object]) -> None:
        self.worker = HostWorker()
        self.new_region: Callable[[int], HostRegion] | None = None
        self.observer: Observer | None = None
        self.largest_bytes = 0
        self.total_bytes = 0
        self._transfer = transfer
        self._on_backward = on_backward
        self._arriving: dict[int, Arriving] = {}
        self._landings: dict[int, Landing] = {}
        self._handles: list[tuple[PlainTensor, list]] = []
        self._ring: StagingRing | None = None

    def watch(self, tensor: PlainTensor, region: HostRegion) -> None:
        """Take charge of one parameter's gradient; ``region`` is where it lands."""
        parameter = tensor.tensor
        if parameter.grad is not None and parameter.grad.device.type != "cpu":
            _set_gradient(tensor, parameter.grad.to("cpu"))
        self._landings[id(parameter)] = Landing(region)
        self.largest_bytes = max(self.largest_bytes, region.nbytes)
        self.total_bytes += align(region.nbytes)
        # Weak, because the garbage collector does not see into a tensor's hooks.
        references = weakref.ref(self), weakref.ref(tensor)
        handles = [
            parameter.register_hook(functools.partial(_before_accumulation, *references)),
            parameter.register_post_accumulate_grad_hook(functools.partial(_after_accumulation, *references)),
        ]
        self._handles.append((tensor, handles))

    def finish(self) -> None:
        """Wait for all that is on its way and give every parameter its gradient.

        Raises:
            BaseException: What the worker met.
        """
        if not self._arriving:
            return
        self._transfer.finish_gradients()
        arriving, self._arriving = self._arriving, {}
        try:
            self.worker.drain()
        finally:
            for entry in arriving.values():
                parts = [part for part in (entry.total, *entry.later) if part is not None]
                _set_gradient(entry.tensor, functools.reduce(_add, parts) if parts else None)

    def remove(self) -> None:
        """Finish, and take every hook off."""
        self.finish()
        self.worker.close()
        for tensor, handles in self._handles:
            for handle in handles:
                handle.remove()
            _drop_empty_hook_dicts(tensor.tensor)
        self._handles.clear()

    def put_aside(self, tensor: PlainTensor) -> None:
        """Keep the host gradient out of autograd's reach while a new one comes.

        Raises:
            OffloadError: If somebody else waits for it to be accumulated.
        """
        self._on_backward()
        if has_other_accumulation_hooks(tensor.tensor):
            raise OffloadError(
                f"{tensor.path} was given a post-accumulate-grad hook while its gradient goes to the host. "
                f"The hook would find no gradient, or a part of it. {HOOKS_WAY_OUT}."
            )
        entry = self._entry(tensor)
        if tensor.tensor.grad is not None:
            entry.total = tensor.tensor.grad
            tensor.tensor.grad = None

    def send_home(self, tensor: PlainTensor) -> None:
        """Start the new gradient's way to the host."""
        self._on_backward()
        gradient = tensor.tensor.grad
        if gradient is None:
            return
        tensor.tensor.grad = None
        entry = self._entry(tensor)
        entry.num_parts += 1
        if gradient.device != self._transfer.device or not _is_plain(gradient):
            # On another device: autograd copied it to where the parameter is, as it does when it cannot
            # take the gradient over.
            entry.later.append(self._send_now(gradient))
        elif entry.total is None and not entry.later:
            entry.total = self._landings[id(tensor.tensor)].like(gradient)
            entry.arrival = self._transfer.send_gradient(gradient, entry.total)
        elif entry.total is not None and not entry.later and self._can_stage(entry.total, gradient):
            self._add_soon(entry, gradient)
        else:
            entry.later.append(self._send_now(gradient))
        if self.observer is not None:
            self.observer(entry)

    def _entry(self, tensor: PlainTensor) -> Arriving:
        return self._arriving.setdefault(id(tensor.tensor), Arriving(tensor))

    def _can_stage(self, total: torch.Tensor, gradient: torch.Tensor) -> bool:
        if not _is_plain(total) or total.device.type != "cpu" or total.dtype != gradient.dtype:
            return False
        if self._ring is None:
            assert self.new_region is not None
            nbytes = max(2 * align(self.largest_bytes), min(_STAGING_BYTES, self.total_bytes))
            self._ring = StagingRing(self.new_region(nbytes))
        return align(nbytes_of(gradient)) <= self._ring.capacity_bytes

    def _add_soon(self, entry: Arriving, gradient: torch.Tensor) -> None:
        ring, total = self._ring, entry.total
        assert ring is not None and total is not None
        part = ring.like(gradient)
        arrival = entry.arrival = self._transfer.send_gradient(gradient, part)
        entry.has_additions = True

        def add() -> None:
            try:
                arrival.wait()
                total.add_(part)
            finally:
                ring.give_back()

        self.worker.submit(add)

    def _send_now(self, gradient: torch.Tensor) -> torch.Tensor:
        if gradient.device != self._transfer.device:
            return gradient
        self._transfer.moved_to_host_bytes += nbytes_of(gradient)
        host = gradient.to("cpu")
        return host if host is not gradient else gradient.clone()


_Owner = weakref.ref[HostGradients]
_Tensor = weakref.ref[PlainTensor]


def has_other_accumulation_hooks(parameter: torch.Tensor) -> bool:
    """Return whether post-accumulate-grad hooks besides the ones set here are on a parameter."""
    hooks = parameter._post_accumulate_grad_hooks
    if not hooks:
        return False
    return any(getattr(hook, "func", None) is not _after_accumulation for hook in hooks.values())


def _before_accumulation(owner: _Owner, tensor: _Tensor, gradient: torch.Tensor) -> None:
    gradients, managed = owner(), tensor()
    if gradients is not None and managed is not None:
        gradients.put_aside(managed)


def _after_accumulation(owner: _Owner, tensor: _Tensor, parameter: torch.Tensor) -> None:
    gradients, managed = owner(), tensor()
    if gradients is not None and managed is not None:
        gradients.send_home(managed)


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) is torch.Tensor and tensor.layout == torch.strided and not tensor.requires_grad


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
