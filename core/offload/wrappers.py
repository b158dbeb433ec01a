"""Traceable wrapper subclasses (quantised weights) as the plain tensors inside them.

What this module does not do: it knows no particular subclass; PyTorch's protocol says it all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

Rebuild = Callable[[Sequence[torch.Tensor]], torch.Tensor]


def take_apart(tensor: torch.Tensor) -> tuple[list[torch.Tensor], Rebuild]:
    """Return the plain tensors inside and a function that builds a like object around others.

    Follows PyTorch's protocol of traceable wrapper subclasses (``__tensor_flatten__``), nested ones
    included.
    """
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor], lambda leaves: leaves[0]
    names, context = tensor.__tensor_flatten__()  # pyright: ignore[reportAttributeAccessIssue]
    parts = [take_apart(getattr(tensor, name)) for name in names]
    kind, size, stride = type(tensor), tensor.size(), tensor.stride()

    def rebuild(leaves: Sequence[torch.Tensor]) -> torch.Tensor:
        inner: dict[str, torch.Tensor] = {}
        start = 0
        for name, (own_leaves, build) in zip(names, parts, strict=True):
            inner[name] = build(leaves[start : start + len(own_leaves)])
            start += len(own_leaves)
        return kind.__tensor_unflatten__(inner, context, size, stride)  # pyright: ignore

    return [leaf for own_leaves, _ in parts for leaf in own_leaves], rebuild
