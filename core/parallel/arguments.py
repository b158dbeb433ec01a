"""Find and replace one argument of a call, whether it is passed by position or by name."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from typing import Any

from torch import nn

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True)
class ArgumentSlot:
    """Where one argument of a callable is found.

    Args:
        name: Its name.
        position: Its index among positional arguments, or None if it is passed by name only.
    """

    name: str
    position: int | None

    def read(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Return the value passed, or None if the call leaves it out."""
        if self.name in kwargs:
            return kwargs[self.name]
        if self.position is not None and self.position < len(args):
            return args[self.position]
        return None

    def replace(self, args: tuple, kwargs: dict[str, Any], value: Any) -> tuple[tuple, dict[str, Any]]:
        """Return the call's arguments with the value replaced; the argument must have been passed."""
        if self.name in kwargs:
            return args, {**kwargs, self.name: value}
        assert self.position is not None
        return (*args[: self.position], value, *args[self.position + 1 :]), kwargs


def named_slots(signature: inspect.Signature) -> dict[str, ArgumentSlot]:
    """Return the slots of a signature's named parameters; ``*args`` and ``**kwargs`` have none."""
    slots: dict[str, ArgumentSlot] = {}
    for position, parameter in enumerate(signature.parameters.values()):
        if parameter.kind in _NAMED:
            by_name_only = parameter.kind is inspect.Parameter.KEYWORD_ONLY
            slots[parameter.name] = ArgumentSlot(parameter.name, None if by_name_only else position)
    return slots


def find_slot(signature: inspect.Signature, name: str) -> ArgumentSlot | None:
    """Return the slot of a plan's argument, or None if the signature cannot take it.

    ``args[0]`` is the first of ``*args``; with ``**kwargs`` any other name can be taken.
    """
    slots = named_slots(signature)
    if name in slots:
        return slots[name]
    kinds = [parameter.kind for parameter in signature.parameters.values()]
    match = re.fullmatch(r"args\[(\d+)\]", name)
    if match and inspect.Parameter.VAR_POSITIONAL in kinds:
        num_before = kinds.index(inspect.Parameter.VAR_POSITIONAL)
        return ArgumentSlot(name, num_before + int(match[1]))
    if not match and inspect.Parameter.VAR_KEYWORD in kinds:
        return ArgumentSlot(name, None)
    return None


def slot_of(signature: inspect.Signature, name: str) -> ArgumentSlot:
    """Return the slot of ``name``; one that only ``**kwargs`` can take is found by name."""
    return named_slots(signature).get(name, ArgumentSlot(name, None))


def signature_of(module: nn.Module) -> inspect.Signature:
    """Return the signature of a module's own forward, without ``self`` and whatever hooks are on it."""
    signature = inspect.signature(type(module).forward)
    return signature.replace(parameters=list(signature.parameters.values())[1:])
