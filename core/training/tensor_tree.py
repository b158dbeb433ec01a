"""A nested value taken apart into its tensors and the rest, and put together again.

What this module does not do: it looks at no tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten


@dataclass(frozen=True)
class TensorTree:
    """The rest: everything but the tensors.

    Attributes:
        leaves: Everything that is nested, in order, with None in the place of each tensor.
        positions: Where the tensors were.
        spec: How the leaves are nested.
    """

    leaves: tuple[Any, ...]
    positions: tuple[int, ...]
    spec: TreeSpec

    @classmethod
    def split(
        cls, value: Any, *, takes: Callable[[Tensor], bool] = lambda _: True
    ) -> tuple[Self, list[Tensor]]:
        """Take ``value`` apart; tensors that ``takes`` does not want stay with the rest."""
        leaves, spec = tree_flatten(value)
        found = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and takes(leaf)}
        rest = tuple(None if i in found else leaf for i, leaf in enumerate(leaves))
        return cls(rest, tuple(found), spec), list(found.values())

    def join(self, tensors: Sequence[Tensor]) -> Any:
        """Return the value around ``tensors``."""
        leaves = list(self.leaves)
        for position, tensor in zip(self.positions, tensors, strict=True):
            leaves[position] = tensor
        return tree_unflatten(leaves, self.spec)
