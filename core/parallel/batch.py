"""Split a model's call along its batch, and join the results: batch parallelism.

Exact for models whose samples do not see each other. Nothing is padded: parts differ by one sample at most,
and a batch smaller than the number of parts makes fewer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..errors import RequestError


def batch_size(inputs: torch.Tensor | Sequence[torch.Tensor]) -> int:
    """Return the number of samples of a model's main input, one tensor or several of one batch."""
    return (inputs if isinstance(inputs, torch.Tensor) else inputs[0]).shape[0]


def split_batch(
    arguments: Mapping[str, Any], parts: int, *, size: int, whole: frozenset[str] = frozenset()
) -> list[dict[str, Any]]:
    """Return the arguments of one call for each part of the batch, ``parts`` at most.

    Args:
        arguments: Keyword arguments; tensors, also inside lists, tuples and dictionaries, have the batch as
            dim 0, or 1 there for all samples.
        parts: How many calls are wanted.
        size: Samples of the batch.
        whole: Names of arguments that every call gets as they are.

    Raises:
        RequestError: If a tensor is neither for all samples nor one row for each.
    """
    count = max(1, min(parts, size))
    if count == 1:
        return [dict(arguments)]
    least, more = divmod(size, count)
    calls, start = [], 0
    for part in range(count):
        length = least + (part < more)
        take = _Taking(start, length, size)
        calls.append({
            name: value if name in whole else take(value, name) for name, value in arguments.items()
        })  # fmt: skip
        start += length
    return calls


def join_batch(outputs: Sequence[Any]) -> Any:
    """Return the outputs of the parts as those of one batch: tensors, or lists and tuples of them.

    Raises:
        TypeError: If they hold something else.
    """
    first = outputs[0]
    if len(outputs) == 1:
        return first
    if isinstance(first, torch.Tensor):
        return torch.cat(list(outputs))
    if isinstance(first, list | tuple):
        return type(first)(join_batch(items) for items in zip(*outputs, strict=True))
    raise TypeError(f"a {type(first).__name__} cannot be joined along the batch")


class _Taking:
    """Takes samples ``start`` to ``start + length`` of every tensor."""

    def __init__(self, start: int, length: int, size: int) -> None:
        self.start = start
        self.length = length
        self.size = size

    def __call__(self, value: Any, place: str) -> Any:
        if isinstance(value, torch.Tensor):
            return self._rows(value, place)
        if isinstance(value, dict):
            return {key: self(item, f"{place}.{key}") for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self(item, f"{place}[{index}]") for index, item in enumerate(value))
        return value

    def _rows(self, tensor: torch.Tensor, place: str) -> torch.Tensor:
        if tensor.ndim == 0 or tensor.shape[0] == 1:
            return tensor
        if tensor.shape[0] != self.size:
            raise RequestError(
                f"splitting a batch of {self.size} over GPUs was asked, but {place} is {tuple(tensor.shape)}",
                limit="Each tensor must have one row for each sample, or one for all",
                way_out="Set batch_degree to 1",
            )
        return tensor.narrow(0, self.start, self.length)
