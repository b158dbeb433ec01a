"""One recording of a block: its forward, and the backward that belongs to it, as two CUDA graphs.

Both work on memory of their own for arguments, what is trained, outputs and gradients, which is shared by
all recordings of one signature: they run one after the other. Only the frozen weights are read where they
are. So one recording serves every block whose weights come to the same place, as those of equal blocks do
that are streamed through the same slots.

Source: CUDA graphs, https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ..cuda_capture import CudaCapture
from ..offload import reading
from .block_reads import BlockReads
from .tensor_tree import TensorTree

Replay = Callable[[], None]


class Recorder(Protocol):
    """Records what calls launch."""

    def __call__(self, call: Callable[[], None]) -> Replay:
        """Record ``call``; return what launches it again."""
        ...


class CudaGraphRecorder:
    """Records CUDA graphs in one pool of memory."""

    def __init__(self) -> None:
        self._capture = CudaCapture()

    def __call__(self, call: Callable[[], None]) -> Replay:
        """Record ``call`` without running it."""
        replay, _ = self._capture(call)
        return replay

    def pool_bytes(self) -> int:
        """Return the memory of the pool, which PyTorch's peaks do not count while graphs are replayed."""
        return self._capture.pool_bytes()


@dataclass(frozen=True)
class Meta:
    """What memory for a tensor must be like."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tensor: Tensor) -> Meta:
        """Return that of ``tensor``."""
        return Meta(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)


@dataclass(frozen=True)
class Signature:
    """What two calls must have in common to be served by the same memory.

    Attributes:
        call: The arguments' structure, everything in them that is no tensor, and the tensors' shapes.
        needs_gradient: Which of the tensors get a gradient.
        wanted: Which of the output tensors have one.
        trained: Of what is trained.
        provided: Of what other code provides, with the argument that it depends on.
    """

    call: Hashable
    needs_gradient: tuple[bool, ...]
    wanted: tuple[bool, ...]
    trained: tuple[Meta, ...]
    provided: tuple[tuple[int, Meta], ...]


class StaticMemory:
    """The memory that all recordings of one signature work on.

    Recordings run one after the other, so those of other signatures may use the same places. A gradient of
    an output, and of an input, may lie where an output was: by then nobody needs that.

    Args:
        signature: Whose.
        inputs: Tensors like the arguments.
        reads: What the call trains and is provided with.
        outputs: Tensors like the outputs.
        places: Memory in use for other signatures; what is new here is added to it.
    """

    def __init__(
        self,
        signature: Signature,
        inputs: Sequence[Tensor],
        reads: BlockReads,
        outputs: Sequence[Tensor],
        places: dict[Hashable, Tensor],
    ) -> None:
        def place(kind: str, index: int, like: Tensor) -> Tensor:
            key = kind, index, Meta.of(like)
            if key not in places:
                with torch.no_grad():
                    places[key] = like.detach().clone()
            return places[key]

        self.inputs = [place("input", *item) for item in enumerate(inputs)]
        self.trained = [place("trained", *item) for item in enumerate(reads.trained)]
        self.trained_gradients = [place("trained gradient", *item) for item in enumerate(reads.trained)]
        self.provided = [place("provided", i, read.example) for i, read in enumerate(reads.provided)]
        self.outputs = [place("output", *item) for item in enumerate(outputs)]
        self.output_gradients = {
            index: self.outputs[index]
            for index, (output, wanted) in enumerate(zip(outputs, signature.wanted, strict=True))
            if wanted and output.requires_grad
        }
        needed = [index for index, needs in enumerate(signature.needs_gradient) if needs]
        self.input_gradients = {
            index: place("output", position, inputs[index]) for position, index in enumerate(needed)
        }

    def load(self, inputs: Sequence[Tensor], trained: Sequence[Tensor], provided: Sequence[Tensor]) -> None:
        """Copy what the next replay reads."""
        with torch.no_grad():
            for static, tensor in zip(self.inputs, inputs, strict=True):
                static.copy_(tensor)
            if trained:
                torch._foreach_copy_(self.trained, [tensor.detach() for tensor in trained])
            if provided:
                torch._foreach_copy_(self.provided, list(provided))


class BlockRecording:
    """A block's forward and backward on given memory, recorded.

    Args:
        memory: What they read and write.
        needs_gradient: Which inputs get a gradient.
    """

    def __init__(self, memory: StaticMemory, needs_gradient: Sequence[bool]) -> None:
        self.memory = memory
        self.needs_gradient = list(needs_gradient)
        self._missing: set[int] = set()
        self._outputs: TensorTree | None = None
        self._live: tuple[list[Tensor], list[Tensor]] | None = None
        self._replay_forward: Replay | None = None
        self._replay_backward: Replay | None = None

    def record(self, run: Callable[[list[Tensor]], Any], trained: list[Tensor], recorder: Recorder) -> None:
        """Record a call.

        Args:
            run: Makes the call on the tensors that it is given.
            trained: What the call trains; it points at the static memory meanwhile.
            recorder: Records.
        """
        self._run, self._trained = run, trained
        # Both within one substitution: the backward reads what the forward has saved.
        with _pointing_at(trained, self.memory.trained):
            self._replay_forward = recorder(self._forward)
            self._replay_backward = recorder(self._backward)
        del self._run, self._trained

    def replay_forward(self) -> list[Tensor]:
        """Compute again on what was loaded; the outputs are static memory."""
        assert self._replay_forward is not None
        self._replay_forward()
        return self.memory.outputs

    def replay_backward(
        self, gradients: dict[int, Tensor]
    ) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """Return copies of the gradients of the inputs that get one, and of what trains.

        It belongs to the last ``replay_forward``.

        Args:
            gradients: Of every output that has one, by its index.
        """
        assert self._replay_backward is not None
        memory = self.memory
        for index, static in memory.output_gradients.items():
            static.copy_(gradients[index])
        self._replay_backward()
        places = [*memory.input_gradients.values(), *memory.trained_gradients]
        copies = [None if index in self._missing else place.clone() for index, place in enumerate(places)]
        num_inputs = len(memory.input_gradients)
        return copies[:num_inputs], copies[num_inputs:]

    def join_outputs(self, tensors: Sequence[Tensor]) -> Any:
        """Return the block's output structure around ``tensors``."""
        assert self._outputs is not None
        return self._outputs.join(tensors)

    def _forward(self) -> None:
        memory = self.memory
        pairs = zip(memory.inputs, self.needs_gradient, strict=True)
        inputs = [tensor.detach().requires_grad_(needed) for tensor, needed in pairs]
        with torch.enable_grad(), reading(_StaticReads(memory.provided)):
            self._outputs, outputs = TensorTree.split(self._run(inputs))
        with torch.no_grad():
            for static, output in zip(memory.outputs, outputs, strict=True):
                static.copy_(output)
        self._live = inputs, outputs

    def _backward(self) -> None:
        assert self._live is not None
        (inputs, outputs), self._live = self._live, None
        memory = self.memory
        wanted = [inputs[index] for index in memory.input_gradients] + self._trained
        gradients = torch.autograd.grad(
            [outputs[index] for index in memory.output_gradients],
            wanted,
            list(memory.output_gradients.values()),
            allow_unused=True,
        )
        places = [*memory.input_gradients.values(), *memory.trained_gradients]
        with torch.no_grad():
            for index, (static, gradient) in enumerate(zip(places, gradients, strict=True)):
                if gradient is None:
                    self._missing.add(index)
                else:
                    static.copy_(gradient)


class _StaticReads:
    """Gives a recording the static memory in place of what other code provides."""

    def __init__(self, provided: Sequence[Tensor]) -> None:
        self._remaining = iter(provided)

    def read(self, source: Tensor, fetch: Callable[[Tensor], Tensor | None]) -> Tensor | None:
        return next(self._remaining, None)


@contextlib.contextmanager
def _pointing_at(tensors: Sequence[Tensor], places: Sequence[Tensor]) -> Iterator[None]:
    before = [tensor.data for tensor in tensors]
    try:
        for tensor, place in zip(tensors, places, strict=True):
            tensor.data = place
        yield
    finally:
        for tensor, data in zip(tensors, before, strict=True):
            tensor.data = data
