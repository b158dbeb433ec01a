"""One call of a block, taken apart into tensors and the rest.

What this module does not do: it decides nothing about the call.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from ..module_hooks import Forward
from .block_recording import Meta
from .tensor_tree import TensorTree

_BY_VALUE = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, enum.Enum)


class _Same:
    """Equal for the same object only, which it keeps alive."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


class BlockCall:
    """The arguments of one call.

    Attributes:
        tensors: Those among them, in order.
        key: Everything else, with each tensor's shape, strides and dtype.
        needs_gradient: Which tensors get a gradient.
    """

    def __init__(self, forward: Forward, tree: TensorTree, tensors: list[Tensor], key: Hashable) -> None:
        self._forward, self._tree = forward, tree
        self.tensors = tensors
        self.key = key
        self.needs_gradient = tuple(tensor.requires_grad for tensor in tensors)

    @classmethod
    def of(
        cls, forward: Forward, module: nn.Module, arguments: tuple, *, device: torch.device
    ) -> Self | None:
        """Take a call apart; None if it is of a kind that is never recorded.

        That is one with tensors elsewhere or of a subclass, under autocast, while compiling, or within
        another recording.
        """
        if (
            torch.is_autocast_enabled(device.type)
            or torch.is_inference_mode_enabled()
            or _is_compiling(device)
        ):
            return None
        tree, tensors = TensorTree.split(arguments)
        if any(type(t) is not Tensor or t.device != device or t.layout != torch.strided for t in tensors):
            return None
        rest = tuple(
            (type(leaf), leaf) if isinstance(leaf, _BY_VALUE) else _Same(leaf) for leaf in tree.leaves
        )
        metas = tuple(Meta.of(tensor) for tensor in tensors)
        key = type(module), module.training, tree.spec, tree.positions, rest, metas
        return cls(forward, tree, tensors, key)

    def run(self) -> Any:
        """Make the call as it was asked for."""
        return self.run_on(self.tensors)

    def run_on(self, tensors: Sequence[Tensor]) -> Any:
        """Make the call on other tensors."""
        args, kwargs = self.arguments_with(tensors)
        return self._forward(*args, **kwargs)

    def arguments_with(self, tensors: Sequence[Tensor]) -> tuple[tuple, dict[str, Any]]:
        """Return the arguments with other tensors."""
        return self._tree.join(tensors)

    def detached(self) -> list[Tensor]:
        """Return the tensors without their history; those that get a gradient are leaves."""
        pairs = zip(self.tensors, self.needs_gradient, strict=True)
        return [tensor.detach().requires_grad_(needed) for tensor, needed in pairs]

    @staticmethod
    def output_tensors(output: Any) -> list[Tensor]:
        """Return the tensors in what a call returned."""
        return TensorTree.split(output)[1]


def _is_compiling(device: torch.device) -> bool:
    if torch.compiler.is_compiling():
        return True
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
