"""Check a saved graph against the definitions of the nodes it uses, without a server or a browser."""

from __future__ import annotations

from typing import Any

from .graph_to_prompt import widget_names
from .node_definitions import FILE_INPUTS

Definitions = dict[str, Any]
_NOTES = {"Note", "MarkdownNote"}
_DYNAMIC = "COMFY_DYNAMICCOMBO"


def missing_nodes(graph: dict[str, Any], definitions: Definitions) -> set[str]:
    """Return the classes that a ComfyUI with these definitions lacks."""
    return {node["type"] for node in graph["nodes"]} - definitions.keys() - _NOTES


def problems(graph: dict[str, Any], definitions: Definitions) -> list[str]:
    """Return what is wrong with the graph, node by node; nothing if it is sound."""
    nodes = {node["id"]: node for node in graph["nodes"]}
    found = _link_problems(graph, nodes)
    for node in graph["nodes"]:
        if node["type"] not in _NOTES:
            where = f"node {node['id']} ({node['type']})"
            found += [f"{where}: {text}" for text in _node_problems(node, definitions[node["type"]])]
    return found


def _link_problems(graph: dict[str, Any], nodes: dict[int, Any]) -> list[str]:
    found = []
    for number, source, slot, target, index, kind in graph["links"]:
        output, socket = nodes[source]["outputs"][slot], nodes[target]["inputs"][index]
        if output["type"] != kind or number not in (output["links"] or []):
            found.append(f"link {number}: output {slot} of node {source} is {output}")
        if socket["link"] != number or kind not in str(socket["type"]).split(","):
            found.append(f"link {number}: input {index} of node {target} is {socket}")
    return found


def _node_problems(node: dict[str, Any], definition: dict[str, Any]) -> list[str]:
    known = {
        name: (part, specification)
        for part, inputs in definition["input"].items()
        for name, specification in inputs.items()
    }
    linked = {socket["name"] for socket in node["inputs"] if socket["link"] is not None}
    names = widget_names(definition)
    # Choices with widgets of their own, which only the front-end can lay out.
    dynamic = {
        name for name, (_, specification) in known.items() if str(specification[0]).startswith(_DYNAMIC)
    }
    found = [f"it has no input {name!r}" for name in linked if name not in known]
    found += [
        f"nothing is connected to {name!r}"
        for name, (part, _) in known.items()
        if part == "required" and name not in {*names, *linked, *dynamic}
    ]
    outputs = [output["type"] for output in node["outputs"]]
    if outputs != list(definition["output"])[: len(outputs)]:
        found.append(f"its outputs are {outputs}, not {definition['output']}")
    values = node["widgets_values"]
    if len(values) > len(names) and not dynamic:
        found.append(f"{len(values)} values for the widgets {names}")
    for name, value in zip(names, values, strict=False):
        if name is not None and name not in linked and name not in FILE_INPUTS:
            found += _value_problems(name, value, known[name][1])
    return found


def _value_problems(name: str, value: Any, specification: list[Any]) -> list[str]:
    kind, options = specification[0], specification[1] if len(specification) > 1 else {}
    choices = kind if isinstance(kind, list) else options.get("options", [])
    if choices:
        keys = [choice["key"] if isinstance(choice, dict) else choice for choice in choices]
        return [] if value in keys else [f"{name} is {value!r}, not one of {keys}"]
    expected = {"INT": int, "FLOAT": (int, float), "STRING": str, "BOOLEAN": bool}.get(kind)
    if expected is not None and not isinstance(value, expected):
        return [f"{name} is {value!r}, which is no {kind}"]
    if kind in ("INT", "FLOAT") and not options.get("min", value) <= value <= options.get("max", value):
        return [f"{name} is {value}, outside {options.get('min')} to {options.get('max')}"]
    return []
