"""Keep only each block's inputs for the backward pass, and compute the block again there.

Gradient checkpointing (arXiv:1604.06174), one block at a time. Written as one autograd function
instead of ``torch.utils.checkpoint``, because

- the recomputation runs as ordinary autograd, with its own check for tensors changed in place; the
  saved-tensor hooks of the non-reentrant kind switch that check off;
- at its first call the block works on copies of its floating inputs, so that one which changes them is
  found; from then on autograd's check of the kept inputs would find it;
- it works if no input carries a gradient, as in front of the first adapter.

The model's last block is run once only, unless asked otherwise: the backward begins with it, so what it
keeps costs no more memory than computing it again would.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import TrainingError
from ..module_hooks import Forward, ModuleHook, install_hook, remove_hook
from .host_inputs import HostInputs, SentInputs
from .targets import Block
from .tensor_tree import TensorTree

_HOOK = "checkpoint"
# Compared values of each output, and how far they may be apart: the same kernels on the same inputs, but
# GPU kernels may add in another order.
_PROBES = 4096
_TOLERANCE = 1e-2


class BlockCheckpointing:
    """Checkpointing of a model's blocks; to be installed before whatever must run inside it again.

    Args:
        blocks: The blocks, in the order in which they run.
        keeps_last: Whether the last one keeps what it makes and is not computed again. False for blocks that
            are recorded: their memory is there for all of them.
        inputs_on_host: Whether the blocks' inputs wait for the backward on the host, see ``host_inputs``.
    """

    def __init__(
        self, blocks: Sequence[Block], *, keeps_last: bool = True, inputs_on_host: bool = False
    ) -> None:
        self.blocks = list(blocks)
        self.checkpointed = self.blocks[:-1] if keeps_last else self.blocks
        self._host_inputs = HostInputs() if inputs_on_host else None
        self._installed: list[nn.Module] = []

    def install(self) -> None:
        """Wrap the blocks."""
        for block in self.checkpointed:
            install_hook(block.module, _HOOK, _CheckpointHook(block.path, self._host_inputs))
            self._installed.append(block.module)

    def remove(self) -> None:
        """Unwrap the blocks."""
        for module in self._installed:
            remove_hook(module, _HOOK)
        self._installed.clear()


class _Wanted(threading.local):
    outputs: tuple[bool, ...] | None = None


_wanted = _Wanted()


def wanted_outputs() -> tuple[bool, ...] | None:
    """Return which of a block's output tensors have a gradient, while it is computed again; else None."""
    return _wanted.outputs


@contextlib.contextmanager
def _wanting(outputs: Sequence[bool]) -> Iterator[None]:
    before, _wanted.outputs = _wanted.outputs, tuple(outputs)
    try:
        yield
    finally:
        _wanted.outputs = before


class _CheckpointHook(ModuleHook):
    def __init__(self, path: str, host_inputs: HostInputs | None) -> None:
        self.path = path
        self.host_inputs = host_inputs
        self.checked = False
        self.compared = False

    def run(self, forward: Forward, module: nn.Module, args: tuple, kwargs: dict) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        call = _Call(self, forward, module, (args, kwargs))
        outputs = _Recompute.apply(call, torch.empty(0, requires_grad=True), *call.take_inputs())
        return call.join_outputs(outputs)

    def check_unchanged(self, copies: Sequence[Tensor]) -> None:
        """Refuse a block that wrote to its inputs; its caller would have seen the change."""
        if self.checked:
            return
        self.checked = True
        if any(copy._version != 0 for copy in copies):
            raise TrainingError(
                f"the block {self.path} changes its input in place, so its gradients would be silently wrong "
                "under gradient checkpointing. Switch gradient_checkpointing off for this model."
            )

    def check_recomputed(self, probes: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Refuse a block whose second run gives something else than its first; once is enough."""
        self.compared = True
        for first, output in zip(probes, outputs, strict=True):
            second = _probe(output)
            size, error = float(first.norm()), float((second - first).norm())
            # Not finite: that is for the guard of the training to find.
            if math.isfinite(size) and error > _TOLERANCE * size:
                raise TrainingError(
                    f"the block {self.path} gives another output ({error / max(size, 1e-30):.2%}) when it is "
                    "computed again, so its gradients would be silently wrong under gradient checkpointing. "
                    "Switch gradient_checkpointing off for this model."
                )


class _Call:
    """One call of a block: everything needed to make it again, except the tensors autograd keeps."""

    def __init__(self, hook: _CheckpointHook, forward: Forward, module: nn.Module, arguments: tuple) -> None:
        self.hook = hook
        self.forward = forward
        # Inference tensors carry no gradient and autograd refuses to keep them; they stay with the rest.
        self.arguments, inputs = TensorTree.split(arguments, takes=lambda tensor: not tensor.is_inference())
        self.inputs = inputs
        self.autocast = _autocast_state(inputs)
        self.random = _RandomState.take(inputs) if module.training else None
        self.probes: list[Tensor] | None = None
        self.outputs: TensorTree | None = None
        self.sent: SentInputs | None = None

    def take_inputs(self) -> list[Tensor]:
        """Hand the input tensors over: autograd keeps them, and lets go of them after their backward."""
        inputs, self.inputs = self.inputs, []
        return inputs

    def send_inputs(self, tensors: Sequence[Tensor], needed: Sequence[bool]) -> list[Tensor]:
        """Send the hidden states to the host, if that is wanted; return what autograd has to keep.

        Others, such as position tables, are the same for all blocks.
        """
        owner = self.hook.host_inputs
        if owner is None:
            return list(tensors)
        pairs = enumerate(zip(tensors, needed, strict=True))
        hidden = {index: tensor for index, (tensor, need) in pairs if need and owner.is_worth_it(tensor)}
        self.sent = owner.send(hidden)
        return [tensor for index, tensor in enumerate(tensors) if index not in hidden]

    def fetch_inputs(self, kept: Sequence[Tensor]) -> list[Tensor]:
        """Return the inputs again, from what autograd kept."""
        if self.sent is None or self.hook.host_inputs is None:
            return list(kept)
        fetched, remaining = self.hook.host_inputs.fetch(self.sent), iter(kept)
        count = len(fetched) + len(kept)
        return [fetched[index] if index in fetched else next(remaining) for index in range(count)]

    def run(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Call the block on ``tensors``, or copies of them, and return its output tensors."""
        given, copies = list(tensors), []
        for index, tensor in enumerate(tensors):
            if tensor.is_floating_point() and not self.hook.checked:
                given[index] = tensor.clone()
                copies.append(given[index])
        args, kwargs = self.arguments.join(given)
        with self.autocast():
            self.outputs, found = TensorTree.split(self.forward(*args, **kwargs))
        self.hook.check_unchanged(copies)
        # Views among several outputs, and inputs, may not be written to later on; a caller may want to.
        inputs = {id(tensor) for tensor in tensors}
        return [leaf.clone() if leaf._is_view() or id(leaf) in inputs else leaf for leaf in found]

    def join_outputs(self, tensors: Sequence[Tensor]) -> Any:
        """Return the block's output structure around ``tensors``."""
        assert self.outputs is not None
        return self.outputs.join(tensors)


class _Recompute(torch.autograd.Function):
    """Forward without a graph; backward builds it again from the saved inputs.

    The empty second input always requires a gradient, so that the outputs do.
    """

    @staticmethod
    def forward(ctx: Any, call: _Call, anchor: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)  # an unused output must not look like one with a zero gradient
        kept = call.send_inputs(tensors, ctx.needs_input_grad[2:])
        ctx.save_for_backward(*kept)
        outputs = call.run(tensors)
        if not call.hook.compared:
            call.probes = [_probe(output) for output in outputs]
        ctx.mark_non_differentiable(*(output for output in outputs if not output.is_floating_point()))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[2:]
        call: _Call = ctx.call
        found = call.fetch_inputs(ctx.saved_tensors)
        inputs = [tensor.detach().requires_grad_(need) for tensor, need in zip(found, needed, strict=True)]
        del found
        restored = call.random.restored() if call.random else contextlib.nullcontext()
        with torch.enable_grad(), restored, _wanting([gradient is not None for gradient in gradients]):
            outputs = call.run(inputs)
        if call.probes is not None and not call.hook.compared:
            call.hook.check_recomputed(call.probes, outputs)
        pairs = [
            (output, gradient)
            for output, gradient in zip(outputs, gradients, strict=True)
            if gradient is not None and output.requires_grad
        ]
        if pairs:
            torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])
        return (None, None, *(tensor.grad for tensor in inputs))


def _probe(output: Tensor) -> Tensor:
    """Return a copy of some of a tensor's values, evenly spaced, fp32; the caller may write to the tensor."""
    flat = output.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // _PROBES)].to(torch.float32, copy=True)


def _device_type(tensors: Sequence[Tensor]) -> str:
    return next((tensor.device.type for tensor in tensors if tensor.device.type != "cpu"), "cpu")


def _autocast_state(tensors: Sequence[Tensor]) -> Callable[[], contextlib.AbstractContextManager]:
    device = _device_type(tensors)
    enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    cache = torch.is_autocast_cache_enabled()
    return lambda: torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=cache)


class _RandomState:
    """Generator states before a forward, so that dropout falls the same way again."""

    def __init__(self, cpu: Tensor, device: torch.device | None, accelerator: Tensor | None) -> None:
        self.cpu, self.device, self.accelerator = cpu, device, accelerator

    @classmethod
    def take(cls, tensors: Sequence[Tensor]) -> _RandomState:
        device = next((tensor.device for tensor in tensors if tensor.device.type == "cuda"), None)
        state = torch.cuda.get_rng_state(device) if device is not None else None
        return cls(torch.get_rng_state(), device, state)

    @contextlib.contextmanager
    def restored(self) -> Any:
        devices = [self.device] if self.device is not None else []
        with torch.random.fork_rng(devices=devices):
            torch.set_rng_state(self.cpu)
            if self.device is not None and self.accelerator is not None:
                torch.cuda.set_rng_state(self.accelerator, self.device)
            yield
