"""One call of a block, taken apart into tensors and the rest.

What this module does not do: it decides nothing about the call.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from ..module_hooks import Forward

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

    def __init__(
        self, forward: Forward, leaves: list[Any], spec: Any, positions: list[int], key: Hashable
    ) -> None:
        self._forward, self._leaves, self._spec, self._positions = forward, leaves, spec, positions
        self.key = key
        self.tensors: list[Tensor] = [leaves[index] for index in positions]
        self.needs_gradient = tuple(tensor.requires_grad for tensor in self.tensors)

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
        leaves, spec = tree_flatten(arguments)
        positions, rest = [], []
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                if type(leaf) is not Tensor or leaf.device != device or leaf.layout != torch.strided:
                    return None
                positions.append(index)
                rest.append((tuple(leaf.shape), leaf.stride(), leaf.dtype))
            else:
                rest.append((type(leaf), leaf) if isinstance(leaf, _BY_VALUE) else _Same(leaf))
        key = type(module), module.training, spec, tuple(rest)
        return cls(forward, leaves, spec, positions, key)

    def run(self) -> Any:
        """Make the call as it was asked for."""
        return self.run_on(self.tensors)

    def run_on(self, tensors: Sequence[Tensor]) -> Any:
        """Make the call on other tensors."""
        args, kwargs = self.arguments_with(tensors)
        return self._forward(*args, **kwargs)

    def arguments_with(self, tensors: Sequence[Tensor]) -> tuple[tuple, dict[str, Any]]:
        """Return the arguments with other tensors."""
        leaves = list(self._leaves)
        for index, tensor in zip(self._positions, tensors, strict=True):
            leaves[index] = tensor
        return tree_unflatten(leaves, self._spec)

    def detached(self) -> list[Tensor]:
        """Return the tensors without their history; those that get a gradient are leaves."""
        pairs = zip(self.tensors, self.needs_gradient, strict=True)
        return [tensor.detach().requires_grad_(needed) for tensor, needed in pairs]

    @staticmethod
    def output_tensors(output: Any) -> list[Tensor]:
        """Return the tensors in what a call returned."""
        return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]


def _is_compiling(device: torch.device) -> bool:
    if torch.compiler.is_compiling():
        return True
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
