"""A call in place of which a recording is replayed: what is known of it, its proof, its autograd node."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ..errors import TrainingError
from .block_call import BlockCall
from .block_reads import BlockReads
from .block_recording import BlockRecording, Meta, Signature
from .targets import Block

# Relative norm of the error: the same kernels, but some backwards add in another order each time.
_TOLERANCE = 1e-2


class SeenCall:
    """What is known of one kind of call of one block.

    Attributes:
        reads: What it reads.
        proven: Recordings that gave what the block itself gives.
        signature: What it needs of a recording.
    """

    def __init__(self, reads: BlockReads, call: BlockCall, wanted: tuple[bool, ...]) -> None:
        self.reads = reads
        self.proven: weakref.WeakSet[BlockRecording] = weakref.WeakSet()
        self.signature = Signature(
            call=call.key,
            needs_gradient=call.needs_gradient,
            wanted=wanted,
            trained=tuple(Meta.of(tensor) for tensor in reads.trained),
            provided=tuple((read.index, Meta.of(read.example)) for read in reads.provided),
        )

    def is_current(self) -> bool:
        """Return whether everything that trained then trains still; adapters may be left out later."""
        return all(tensor.requires_grad for tensor in self.reads.trained)

    def provided_for(self, call: BlockCall) -> list[Tensor] | None:
        """Return what other code provides for this call, or None if something is not there."""
        found = []
        for read in self.reads.provided:
            value = read.fetch(call.tensors[read.index])
            if value is None or Meta.of(value) != Meta.of(read.example):
                return None
            found.append(value)
        return found

    def load(self, recording: BlockRecording, call: BlockCall, provided: list[Tensor]) -> None:
        """Copy what the recording's next replay reads."""
        recording.memory.load(call.tensors, self.reads.trained, provided)


class Owner(Protocol):
    """Who has the recordings."""

    @property
    def turn(self) -> int:
        """The number of the last replayed forward."""
        ...

    def replay_forward(self, recording: BlockRecording) -> list[Tensor]:
        """Replay a forward."""
        ...


class Holder(Protocol):
    """Whose calls are replayed."""

    block: Block
    is_bypassed: bool


@dataclass(frozen=True)
class Expected:
    """What a block itself gives for a call.

    Attributes:
        outputs: Its outputs.
        output_gradients: Random ones, by the output's index.
        gradients: Of the inputs that get one, and of what trains, for these.
    """

    outputs: list[Tensor]
    output_gradients: dict[int, Tensor]
    gradients: list[Tensor | None]

    def difference(self, outputs: Sequence[Tensor], recording: BlockRecording) -> str:
        """Return how a replayed forward, and the backward after it, differ from this; empty if not at all.

        Outputs must be equal bit for bit.
        """
        difference = _difference(self.outputs, outputs, tolerance=0.0)
        of_inputs, of_trained = recording.replay_backward(self.output_gradients)
        return difference or _difference(self.gradients, [*of_inputs, *of_trained], tolerance=_TOLERANCE)


def compute(call: BlockCall, seen: SeenCall, recording: BlockRecording) -> Expected | None:
    """Make the call as it is, forward and backward; None if it gives something that is not finite."""
    inputs, trained = call.detached(), seen.reads.trained
    with torch.enable_grad():
        outputs = call.output_tensors(call.run_on(inputs))
    if not all(bool(torch.isfinite(output.detach()).all()) for output in outputs):
        return None
    chosen = recording.memory.output_gradients
    random = torch.Generator(outputs[0].device).manual_seed(0)
    gradients = {index: _noise_like(outputs[index], random) for index in chosen}
    wanted = [tensor for tensor in inputs if tensor.requires_grad] + trained
    found = torch.autograd.grad(
        [outputs[index] for index in chosen], wanted, list(gradients.values()), allow_unused=True
    )
    return Expected([output.detach() for output in outputs], gradients, list(found))


class Replay:
    """One replayed call, between its forward and its backward.

    Args:
        owner: Counts replays.
        holder: Whose call it is.
        seen: What is known of it.
        recording: What is replayed.
        call: The call.
    """

    def __init__(
        self,
        owner: Owner,
        holder: Holder,
        seen: SeenCall,
        recording: BlockRecording,
        call: BlockCall,
    ) -> None:
        self.owner, self.holder, self.recording, self.call = owner, holder, recording, call
        self.trained = seen.reads.trained
        # One tensor of each piece of memory that holds weights: saved for the backward, so that who moves
        # them brings them in for it.
        anchors = {tensor.untyped_storage().data_ptr(): tensor for tensor in seen.reads.frozen}
        self.anchors = list(anchors.values())
        self.anchor_addresses = [tensor.data_ptr() for tensor in self.anchors]
        self.turn = 0

    def differentiable(self) -> list[Tensor]:
        """Return the tensors that get a gradient."""
        needed = zip(self.call.tensors, self.call.needs_gradient, strict=True)
        return [tensor for tensor, needs_gradient in needed if needs_gradient] + self.trained

    def rerun(self, gradients: dict[int, Tensor]) -> list[Tensor | None]:
        """Compute the gradients without the recording; those of what trains are added where they belong."""
        inputs = self.call.detached()
        self.holder.is_bypassed = True
        try:
            with torch.enable_grad():
                args, kwargs = self.call.arguments_with(inputs)
                outputs = self.call.output_tensors(self.holder.block.module(*args, **kwargs))
            torch.autograd.backward([outputs[index] for index in gradients], list(gradients.values()))
        finally:
            self.holder.is_bypassed = False
        return [tensor.grad for tensor in inputs if tensor.requires_grad] + [None] * len(self.trained)


class ReplayedBlock(torch.autograd.Function):
    """The outputs of a replayed forward; its backward replays that of the recording."""

    @staticmethod
    def forward(ctx: Any, replay: Replay, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Replay; ``tensors`` are those that get a gradient."""
        ctx.replay = replay
        ctx.set_materialize_grads(False)
        outputs = replay.owner.replay_forward(replay.recording)
        replay.turn = replay.owner.turn
        ctx.save_for_backward(*replay.anchors)
        given = tuple(_alias(output) for output in outputs)
        chosen = replay.recording.memory.output_gradients
        ctx.mark_non_differentiable(*(o for index, o in enumerate(given) if index not in chosen))
        return given

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return their gradients."""
        replay: Replay = ctx.replay
        addresses = [anchor.data_ptr() for anchor in ctx.saved_tensors]
        found = {index: gradient for index, gradient in enumerate(gradients) if gradient is not None}
        if addresses != replay.anchor_addresses or len(found) < len(replay.recording.memory.output_gradients):
            return (None, *replay.rerun(found))
        if replay.turn != replay.owner.turn:
            raise TrainingError(
                f"the block {replay.holder.block.path} was computed again before its gradient. Do without "
                "RecordedBlocks for this model (in the node: a split_threshold_mb below the size of a block)."
            )
        of_inputs, of_trained = replay.recording.replay_backward(found)
        return (None, *of_inputs, *of_trained)


def _alias(tensor: Tensor) -> Tensor:
    # Not a view for autograd, and not the tensor itself, which would become part of its graph.
    made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return made.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def _noise_like(tensor: Tensor, random: torch.Generator) -> Tensor:
    return torch.randn(tensor.shape, generator=random, device=tensor.device).to(tensor.dtype)


def _difference(
    expected: Sequence[Tensor | None], actual: Sequence[Tensor | None], *, tolerance: float
) -> str:
    for index, (one, other) in enumerate(zip(expected, actual, strict=True)):
        if one is None or other is None:
            if one is not other:
                return f"tensor {index} has a gradient in one of them only"
            continue
        if torch.equal(one, other):
            continue
        size, error = float(one.detach().double().norm()), float((one - other).detach().double().norm())
        if not error <= tolerance * size:
            return f"tensor {index} by {error / max(size, 1e-30):.1e} of its norm"
    return ""
