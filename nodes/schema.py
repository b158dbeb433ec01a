"""Schema arguments that only newer ComfyUI versions know."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def known(constructor: Callable, **arguments: Any) -> dict[str, Any]:
    """Return those of ``arguments`` that ``constructor`` accepts in the running ComfyUI.

    Only for arguments that change how a node looks (``advanced``, ``search_aliases``), never for one that
    changes what it does.
    """
    parameters = inspect.signature(constructor).parameters
    return {name: value for name, value in arguments.items() if name in parameters}


def advanced(entry: Any) -> Any:
    """Return the input, marked as one with a good default, which the front-end may fold away."""
    entry.extra_dict["advanced"] = True  # the argument of that name is newer than ComfyUI 0.3.75
    return entry
