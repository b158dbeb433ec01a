"""The dict that stands in for a managed module's ``_parameters`` or ``_buffers``.

Reading one entry during a forward brings that tensor in, whoever reads it: ``nn.MultiheadAttention``
reads ``out_proj.weight``, a ``ParameterList`` has no forward at all. Iterating does not, so
``state_dict``, optimizers and ``named_parameters`` see the masters, once steps of them that an optimizer
does in the background are over. Assigning an entry is reported,
so that a new tensor is managed too. Copies and pickles are plain dicts.

Idea: DeepSpeed ``runtime/zero/parameter_offload.py`` (``ZeROOrderedDict``), written anew.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from typing_extensions import override

if TYPE_CHECKING:
    from .engine import Engine
    from .tensors import ManagedTensor

Tensors = dict[str, Any]


class ManagedDict(dict):
    """Entries of one module; ``managed`` maps the streamed ones to their managed tensors."""

    __slots__ = ("engine", "is_parameters", "managed", "module", "original", "path")

    def __init__(
        self, original: Tensors, engine: Engine, module: nn.Module, *, path: str, is_parameters: bool
    ) -> None:
        super().__init__(original)
        self.original = original
        self.engine = engine
        self.module = module
        self.path = path
        self.is_parameters = is_parameters
        self.managed: dict[str, ManagedTensor] = {}

    def full_name(self, name: str) -> str:
        """Return the dotted path of an entry."""
        return f"{self.path}.{name}" if self.path else name

    def finish_updates(self) -> None:
        """Let the optimizer's steps of these entries end that go on after ``optimizer.step()``."""
        self.engine.updates.finish_entries(self.managed.values())

    def hand_back(self) -> Tensors:
        """Return the original dict with the present entries."""
        self.original.clear()
        self.original.update(dict.items(self))
        return self.original

    def __getitem__(self, name: str) -> torch.Tensor | None:
        if name in self.managed:
            self.engine.read(self, name)
        return dict.__getitem__(self, name)

    def __setitem__(self, name: str, value: torch.Tensor | None) -> None:
        before = dict.get(self, name)
        dict.__setitem__(self, name, value)
        self.original[name] = value  # not kept alive there once it is replaced here
        if before is not value:
            self.engine.entry_changed(self, name, before)

    def __delitem__(self, name: str) -> None:
        before = dict.get(self, name)
        dict.__delitem__(self, name)
        del self.original[name]
        self.engine.entry_changed(self, name, before)

    @override
    def pop(self, name: str, *default: Any) -> Any:
        if name not in self:
            return dict.pop(self, name, *default)
        value = dict.__getitem__(self, name)
        del self[name]
        return value

    @override
    def popitem(self) -> tuple[str, Any]:
        name = next(reversed(self))
        return name, self.pop(name)

    @override
    def clear(self) -> None:
        for name in list(self):
            del self[name]

    @override
    def setdefault(self, name: str, default: Any = None) -> Any:
        if name not in self:
            self[name] = default
        return self[name]

    @override
    def update(self, *others: Any, **values: Any) -> None:
        for name, value in dict(*others, **values).items():
            self[name] = value

    def __ior__(self, other: Mapping[str, Any]) -> ManagedDict:  # pyright: ignore
        self.update(other)
        return self

    @override
    def get(self, name: str, default: Any = None) -> Any:
        self.finish_updates()
        return dict.get(self, name, default)

    @override
    def items(self) -> Any:
        self.finish_updates()
        return dict.items(self)

    @override
    def values(self) -> Any:
        self.finish_updates()
        return dict.values(self)

    @override
    def copy(self) -> Tensors:
        self.finish_updates()
        return dict(dict.items(self))

    def __copy__(self) -> Tensors:
        return self.copy()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensors:
        copied = copy.deepcopy(self.copy(), memo)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> tuple:
        return (dict, (self.copy(),))
