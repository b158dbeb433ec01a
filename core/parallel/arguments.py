"""Find and replace one argument of a call, whether it is passed by position or by name."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

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


def slot_of(signature: inspect.Signature, name: str) -> ArgumentSlot:
    """Return the slot of ``name``; one that only ``**kwargs`` can take is found by name."""
    return named_slots(signature).get(name, ArgumentSlot(name, None))
