"""Walk the arguments and results of a model's call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def map_tensors(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return ``value`` with ``function`` of every tensor in its place, in dicts, lists and tuples too."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: map_tensors(item, function) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(item, function) for item in value)
    return value
