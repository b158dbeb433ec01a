"""What a block's call reads and does, found by watching one call: whether it can be recorded as a CUDA graph.

A replay repeats kernels on fixed addresses. So whatever the kernels read must be known: the block's
arguments, its frozen weights, what is trained (found in the autograd graph, wherever it lives), what other
code says it provides (``offload.external_reads``), and what the call itself made. Anything else could
change between two steps without the recording knowing, and so could random numbers; a call with either is
not recorded.

What this module does not do: it records nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_flatten, tree_iter
from typing_extensions import override

from ..offload import reading

# A block's forward and backward take at most so much of what its forward keeps.
_BACKWARD_SHARE = 1.5


@dataclass(frozen=True)
class ExternalRead:
    """A tensor that other code provides.

    Attributes:
        index: Which of the call's tensors it depends on.
        fetch: Returns it for such a tensor, or None.
        example: One of them, for its shape and dtype.
    """

    index: int
    fetch: Callable[[Tensor], Tensor | None]
    example: Tensor


@dataclass
class BlockReads:
    """What one call read.

    Attributes:
        frozen: The block's own tensors that are on the device and do not train.
        trained: Tensors that the outputs' gradients lead to, besides the arguments, in the graph's order.
        provided: What other code provided, in the order of the reads.
        obstacle: Why the call cannot be recorded; empty if it can.
        needed_bytes: Device memory that a recording of it takes, about.
    """

    frozen: list[Tensor]
    trained: list[Tensor] = field(default_factory=list)
    provided: list[ExternalRead] = field(default_factory=list)
    obstacle: str = ""
    needed_bytes: int = 0

    def addresses(self) -> tuple[int, ...]:
        """Return where the frozen tensors are at present."""
        return tuple(tensor.data_ptr() for tensor in self.frozen)


def watch_call(
    run: Callable[[], Any], module: nn.Module, inputs: Sequence[Tensor], *, device: torch.device
) -> tuple[Any, BlockReads]:
    """Make a block's call, with gradients, and return its output with what it read.

    Args:
        run: The call.
        module: The block; its weights are where they are during the call.
        inputs: The tensors among its arguments.
        device: Where it computes.
    """
    reads = BlockReads(frozen=list(_frozen_tensors(module, device)))
    reader = _FoundReads(inputs)
    watch = _Watch([*inputs, *reads.frozen])
    random = _random_state(device)
    before_bytes = _allocated_bytes(device)
    with reading(reader), watch:
        output = run()
    kept_bytes = _allocated_bytes(device) - before_bytes
    given = {id(tensor) for tensor in inputs}
    reads.trained = [leaf for leaf in _graph_leaves(tree_iter(output)) if id(leaf) not in given]
    reads.provided = reader.found
    known = [*reads.trained, *(read.example for read in reads.provided)]
    reads.obstacle = (
        reader.obstacle
        or watch.obstacle_besides(known)
        or _obstacle(module, reads.trained, device)
        or ("" if random == _random_state(device) else "it draws random numbers")
    )
    # What the forward keeps, what the backward makes meanwhile, and the memory that goes in and out.
    reads.needed_bytes = int(_BACKWARD_SHARE * kept_bytes) + 2 * sum(_nbytes((*inputs, *reads.trained)))
    return output, reads


def _allocated_bytes(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _nbytes(tensors: Iterable[Tensor]) -> Iterator[int]:
    return (tensor.numel() * tensor.dtype.itemsize for tensor in tensors)


def _frozen_tensors(module: nn.Module, device: torch.device) -> Iterator[Tensor]:
    for part in module.modules():
        for table in (part._parameters, part._buffers):
            for tensor in dict.values(table):
                if tensor is not None and tensor.device == device and not tensor.requires_grad:
                    yield tensor


def _obstacle(module: nn.Module, trained: Sequence[Tensor], device: torch.device) -> str:
    if any(is_traceable_wrapper_subclass(tensor) for tensor in module.parameters()):
        return "it has weights of a tensor subclass"
    if any(tensor.device != device for tensor in trained):
        return "what it trains is on another device"
    if any(tensor._backward_hooks for tensor in trained):
        return "what it trains has gradient hooks"
    return ""


def _random_state(device: torch.device) -> tuple[bytes, bytes]:
    def state(tensor: Tensor) -> bytes:
        return bytes(tensor.tolist())

    on_device = state(torch.cuda.get_rng_state(device)) if device.type == "cuda" else b""
    return state(torch.get_rng_state()), on_device


def _graph_leaves(outputs: Iterable[Any]) -> list[Tensor]:
    """Return the leaves of the autograd graph behind the outputs, depth first."""
    leaves: list[Tensor] = []
    seen: set[Any] = set()
    stack = [value.grad_fn for value in outputs if isinstance(value, Tensor) and value.grad_fn is not None]
    stack.reverse()
    while stack:
        node: Any = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        stack += [parent for parent, _ in reversed(node.next_functions) if parent is not None]
    return leaves


class _FoundReads:
    """Collects what other code provides during the watched call."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        self._inputs = inputs
        self.found: list[ExternalRead] = []
        self.obstacle = ""

    def read(self, source: Tensor, fetch: Callable[[Tensor], Tensor | None]) -> Tensor | None:
        index = next((i for i, tensor in enumerate(self._inputs) if _is_same(tensor, source)), None)
        value = None if index is None else fetch(self._inputs[index])
        if index is None or value is None:
            self.obstacle = "an output that is usually computed ahead was not there"
            return None
        self.found.append(ExternalRead(index, fetch, value))
        return value


def _is_same(one: Tensor, other: Tensor) -> bool:
    return (
        one.data_ptr() == other.data_ptr()
        and one.shape == other.shape
        and one.stride() == other.stride()
        and one.dtype == other.dtype
    )


class _Watch(TorchDispatchMode):
    """Notes memory that operations read, or write, without it being known or made in the call."""

    def __init__(self, known: Sequence[Tensor]) -> None:
        super().__init__()
        self._known = _storages(known)
        self._made: set[int] = set()
        self._unknown: dict[int, str] = {}
        self._written = ""

    def obstacle_besides(self, known: Sequence[Tensor]) -> str:
        """Return what is in the way of a recording if these tensors are known as well."""
        if self._written:
            return self._written
        storages = _storages(known)
        return next((text for storage, text in self._unknown.items() if storage not in storages), "")

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        for tensor in _tensors((args, kwargs)):
            storage = _storage(tensor)
            if storage and storage not in self._known and storage not in self._made:
                shape = tuple(tensor.shape)
                text = f"{func} reads a tensor {shape} on {tensor.device} that is neither argument nor weight"
                self._unknown.setdefault(storage, text)
        self._note_writes(func, args, kwargs)
        for tensor in _tensors(output):
            storage = _storage(tensor)
            if storage not in self._known and storage not in self._unknown:
                self._made.add(storage)
        return output

    def _note_writes(self, func: Any, args: tuple, kwargs: dict) -> None:
        schema = getattr(func, "_schema", None)
        if schema is None or not schema.is_mutable:
            return
        for position, argument in enumerate(schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            for tensor in _tensors(value):
                if _storage(tensor) not in self._made:
                    self._written = f"{func} writes to a tensor that it did not make"


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, Tensor)]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if torch._C._has_storage(tensor) else 0


def _storages(tensors: Iterable[Tensor]) -> set[int]:
    return {_storage(tensor) for tensor in tensors}
