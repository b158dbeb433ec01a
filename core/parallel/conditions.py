"""Whether a rule of a plan applies to a module: a plan covers versions and sizes of a class by conditions."""

from __future__ import annotations

from typing import Any, Protocol

from torch import nn


class Conditional(Protocol):
    """A rule with conditions.

    Attributes:
        having: Attribute that must be there and true: a dotted path from the module, or with a leading
            ``/`` from the model; empty for none.
        lacking: Attribute that must be missing or false.
    """

    @property
    def having(self) -> str: ...  # noqa: D102 - described above

    @property
    def lacking(self) -> str: ...  # noqa: D102


def applies(rule: Conditional, module: nn.Module, model: nn.Module) -> bool:
    """Return whether the conditions of a rule let it apply to a module of the model."""
    having = not rule.having or has(rule.having, module, model)
    return having and not (rule.lacking and has(rule.lacking, module, model))


def has(path: str, module: nn.Module, model: nn.Module) -> bool:
    """Return whether an attribute is there and true, by its path as in ``Conditional.having``."""
    value: Any = model if path.startswith("/") else module
    for name in path.removeprefix("/").split("."):
        value = getattr(value, name, None)
    return value is not None and value is not False
