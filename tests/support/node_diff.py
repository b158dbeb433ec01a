"""Which changes of node definitions break workflows and prompts that people have saved."""

from __future__ import annotations

from typing import Any

from .graph_to_prompt import widget_names

Definitions = dict[str, Any]


def breaking_changes(before: Definitions, after: Definitions) -> list[str]:
    """Return what a graph or prompt saved with ``before`` would stumble over in ``after``.

    A saved graph knows widgets by their place and outputs by their number, a saved prompt knows inputs by
    their name. So nodes, inputs, outputs and choices may be added at the end; nothing may go, move or change
    its type, and what is new may not be required.

    Args:
        before: Node class -> definition, as in ``/object_info``.
        after: The same of the present code.
    """
    found = []
    for kind, old in before.items():
        new = after.get(kind)
        if new is None:
            found.append(f"{kind}: the node is gone")
        else:
            found += [f"{kind}: {text}" for text in _input_changes(old, new) + _output_changes(old, new)]
    return found


def _inputs(definition: dict[str, Any]) -> dict[str, tuple[str, Any]]:
    return {
        name: (part, specification)
        for part in ("required", "optional")
        for name, specification in definition["input"].get(part, {}).items()
    }


def _kind(specification: Any) -> str:
    return "COMBO" if isinstance(specification[0], list) else str(specification[0])


def _choices(specification: Any) -> list[Any]:
    options = specification[1] if len(specification) > 1 else {}
    return specification[0] if isinstance(specification[0], list) else options.get("options", [])


def _input_changes(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    was, now = _inputs(old), _inputs(new)
    found = [f"input {name!r} is gone" for name in was if name not in now]
    for name in was.keys() & now.keys():
        if _kind(was[name][1]) != _kind(now[name][1]):
            found.append(f"input {name!r} was {_kind(was[name][1])} and is {_kind(now[name][1])}")
        elif was[name][0] == "optional" and now[name][0] == "required":
            found.append(f"input {name!r} was optional and is required")
        elif lost := [choice for choice in _choices(was[name][1]) if choice not in _choices(now[name][1])]:
            found.append(f"input {name!r} has lost {lost}")
    found += [
        f"new input {name!r} is required" for name in now if name not in was and now[name][0] == "required"
    ]
    if found:
        return found
    before, after = widget_names(old), widget_names(new)
    if after[: len(before)] != before:
        found.append(f"the widgets were {before} and are {after}: new ones go to the end")
    return found


def _output_changes(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    before, after = list(old["output"]), list(new["output"])
    if after[: len(before)] != before:
        return [f"the outputs were {before} and are {after}: new ones go to the end"]
    return []
