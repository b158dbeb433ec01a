"""A stand-in for CUDA graphs on the CPU: it records operations on fixed memory and repeats them.

As a CUDA graph does, a replay reads and writes the very memory that the recorded operations had, whatever
is there by then, runs no Python of the recorded code, and keeps no reference to memory that it did not make.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map


class TapeRecorder:
    """Records calls; ``num_recordings`` counts them."""

    def __init__(self) -> None:
        self.num_recordings = 0

    def __call__(self, call: Callable[[], None]) -> Callable[[], None]:
        self.num_recordings += 1
        with _Tape() as tape:
            call()
        return tape.replay


class _Tape(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self._steps: list[tuple[Any, tuple, dict, list[Tensor]]] = []
        self._made: set[int] = set()

    def replay(self) -> None:
        with torch.no_grad():
            for func, args, kwargs, outputs in self._steps:
                again = [leaf for leaf in tree_leaves(func(*args, **kwargs)) if isinstance(leaf, Tensor)]
                for old, new in zip(outputs, again, strict=True):
                    if old.data_ptr() != new.data_ptr():
                        old.copy_(new)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kept_args, kept_kwargs = tree_map(self._keep, (args, kwargs or {}))
        output = func(*args, **(kwargs or {}))
        outputs = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        given = {_address(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        self._made |= {_address(leaf) for leaf in outputs if _address(leaf) not in given}
        kept = [self._keep(leaf) for leaf in outputs]
        self._steps.append((func, kept_args, kept_kwargs, kept))
        return output

    def _keep(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if _address(value) in self._made:
            return value.detach()
        storage = value.untyped_storage()
        memory = (ctypes.c_char * max(storage.nbytes(), 1)).from_address(storage.data_ptr() or 1)
        alias = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
        made = torch.empty(0, dtype=value.dtype)
        return made.set_(alias, value.storage_offset(), value.shape, value.stride())


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
