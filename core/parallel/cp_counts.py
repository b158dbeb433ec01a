"""Refuse what a module cannot compute with beside its part of the tokens: whole numbers of them, no times.

A module of which a dictionary splits the sequence may also be given a number: how many of the tokens are the
picture's, or where a part begins. Beside this rank's part such a number is wrong, and nothing has a wrong
shape. Whether it is used at all only the module knows; so it is given a stand-in that says so.
"""

from __future__ import annotations

import inspect
from typing import Any, NoReturn

from ..errors import PlanError

_USES = (
    "index int float bool neg pos abs add radd sub rsub mul rmul floordiv rfloordiv truediv rtruediv mod "
    "rmod divmod rdivmod pow rpow lt le gt ge eq ne"
)


class WholeCount:
    """An integer argument that may be handed on, but not used.

    Args:
        what: The module and the argument, for the message.
        value: The number.
    """

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, what: str, value: int) -> None:
        self._what = what
        self._value = value

    def __repr__(self) -> str:
        return f"{self._what}={self._value}"


def _refuse(self: WholeCount, *_: Any) -> NoReturn:
    raise PlanError(
        f"{self!r} is used in a module of which the _cp_plan cuts the sequence; a number of tokens of the "
        "whole is wrong beside this rank's part. Cut what is inside this module instead, or call shard() "
        "and gather() in the model"
    )


for _name in _USES.split():
    setattr(WholeCount, f"__{_name}__", _refuse)


def refuse_no_times(path: str, name: str, rows: int, num_ranks: int) -> None:
    """Check that no rank is left without times: models reshape them in a way that does not work for none.

    Args:
        path: Of the module.
        name: Of the argument that is split.
        rows: Its rows, on all ranks together.
        num_ranks: How many share them.

    Raises:
        PlanError: On all ranks alike, before any of them waits for another.
    """
    if name == "timestep" and rows < num_ranks:
        raise PlanError(
            f"{path}, {name}: {rows} times cannot be shared by {num_ranks} ranks; use fewer ranks"
        )


def guard_counts(path: str, signature: inspect.Signature, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Return a call's arguments with stand-ins for its integers.

    Args:
        path: Of the module.
        signature: Of its forward.
        args: Positional arguments.
        kwargs: Others.
    """
    names = [*signature.parameters, *(f"argument {index}" for index in range(len(args)))]

    def guarded(name: str, value: Any) -> Any:
        return WholeCount(f"{path}, {name}", value) if type(value) is int else value

    return (
        tuple(guarded(name, value) for name, value in zip(names, args, strict=False)),
        {name: guarded(name, value) for name, value in kwargs.items()},
    )
