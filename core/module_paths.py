"""Select modules by dotted paths with wildcards; shared by plans, offload units and LoRA targets.

``*`` stands for exactly one name, ``0`` for the first and ``-1`` for the last entry of a
``ModuleList`` or ``Sequential``; the empty path is the root.
"""

from __future__ import annotations

import difflib
import re

from torch import nn

from .errors import PlanError

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a whole name of digits
_NEAR = 3
"""Most paths that a message proposes."""


def find_modules(root: nn.Module, path: str) -> list[tuple[str, nn.Module]]:
    """Return ``(full_path, module)`` for every module that ``path`` selects, in model order.

    Raises:
        PlanError: If nothing matches; the message names the part that failed and what is there.
    """
    found, missing = _follow(root, path)
    if missing is not None:
        near = _near_paths(root, path)
        raise PlanError(
            f"module path {path!r} does not resolve in {type(root).__name__}: nothing matches {missing!r}. "
            + (f"Near it are {', '.join(near)}. " if near else "")
            + f"Top-level modules are {[name for name, _ in root.named_children()]}. Correct the path."
        )
    return found


def has_modules(root: nn.Module, path: str) -> bool:
    """Return whether ``path`` selects at least one module."""
    return _follow(root, path)[1] is None


def _follow(root: nn.Module, path: str) -> tuple[list[tuple[str, nn.Module]], str | None]:
    """Return what ``path`` selects, and the part of it that nothing matches, if there is one."""
    found: list[tuple[str, nn.Module]] = [("", root)]
    for part in path.split(".") if path else []:
        found = [match for name, module in found for match in _step(name, module, part)]
        if not found:
            return [], part
    return found, None


def _near_paths(root: nn.Module, path: str) -> list[str]:
    """Return paths that may have been meant, ``*`` for numbers: those of the same end, then close ones."""
    known = list(dict.fromkeys(_NUMBER.sub("*", name) for name, _ in root.named_modules() if name))
    wanted = _NUMBER.sub("*", path.lower())
    same_end = [name for name in known if name.endswith(f".{wanted}")]
    return list(dict.fromkeys([*same_end, *difflib.get_close_matches(wanted, known, n=_NEAR)]))[:_NEAR]


def _step(name: str, module: nn.Module, part: str) -> list[tuple[str, nn.Module]]:
    children = dict(module.named_children())
    if part == "*":
        chosen = list(children)
    elif part == "-1":
        chosen = list(children)[-1:]
    else:
        chosen = [part] if part in children else []
    return [(f"{name}.{child}" if name else child, children[child]) for child in chosen]
