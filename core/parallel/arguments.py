"""Find and replace one argument of a call, whether it is passed by position or by name."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from ..errors import PlanError

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True)
class ArgumentSlot:
    """Where one argument of a callable is found.

    Args:
        name: Its name.
        position: Its index among positional arguments, or None if it is passed by name only.
        item: Which item of it, if it is a tuple or list of several values, or None for all of it.
    """

    name: str
    position: int | None
    item: int | None = None

    def read(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Return the value passed, or None if the call leaves it out.

        Raises:
            PlanError: If an item is meant, and the value has no such item.
        """
        value = None
        if self.name in kwargs:
            value = kwargs[self.name]
        elif self.position is not None and self.position < len(args):
            value = args[self.position]
        if self.item is None or value is None:
            return value
        if not isinstance(value, tuple | list) or self.item >= len(value):
            raise PlanError(
                f"the plan expects {self.name!r} to be a tuple of more than {self.item} values, "
                f"got {type(value).__name__}"
            )
        return value[self.item]

    def replace(self, args: tuple, kwargs: dict[str, Any], value: Any) -> tuple[tuple, dict[str, Any]]:
        """Return the call's arguments with the value replaced; the argument must have been passed."""
        if self.item is not None:
            whole = replace(self, item=None)
            items = list(whole.read(args, kwargs))
            items[self.item] = value
            return whole.replace(args, kwargs, tuple(items))
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

    ``pair[0]`` is the first item of the argument ``pair``, ``args[0]`` the first of ``*args``; with
    ``**kwargs`` any other name can be taken.
    """
    slots = named_slots(signature)
    if name in slots:
        return slots[name]
    item = re.fullmatch(r"(\w+)\[(\d+)\]", name)
    if item and item[1] in slots:
        return replace(slots[item[1]], item=int(item[2]))
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
