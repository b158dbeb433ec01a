"""Select modules by dotted paths with wildcards; shared by plans, offload units and LoRA targets.

``*`` stands for exactly one name, ``0`` for the first and ``-1`` for the last entry of a
``ModuleList`` or ``Sequential``; the empty path is the root.
"""

from __future__ import annotations

from torch import nn

from .errors import PlanError


def find_modules(root: nn.Module, path: str) -> list[tuple[str, nn.Module]]:
    """Return ``(full_path, module)`` for every module that ``path`` selects, in model order.

    Raises:
        PlanError: If nothing matches; the message names the part that failed and what is there.
    """
    found: list[tuple[str, nn.Module]] = [("", root)]
    if path == "":
        return found
    for part in path.split("."):
        found = [match for name, module in found for match in _step(name, module, part)]
        if not found:
            raise PlanError(
                f"module path {path!r} does not resolve in {type(root).__name__}: nothing matches {part!r}. "
                f"Top-level modules are {[name for name, _ in root.named_children()]}. Correct the path."
            )
    return found


def has_modules(root: nn.Module, path: str) -> bool:
    """Return whether ``path`` selects at least one module."""
    try:
        return bool(find_modules(root, path))
    except PlanError:
        return False


def _step(name: str, module: nn.Module, part: str) -> list[tuple[str, nn.Module]]:
    children = dict(module.named_children())
    if part == "*":
        chosen = list(children)
    elif part == "-1":
        chosen = list(children)[-1:]
    else:
        chosen = [part] if part in children else []
    return [(f"{name}.{child}" if name else child, children[child]) for child in chosen]
