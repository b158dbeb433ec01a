"""Turn a saved graph (what the canvas saves) into a prompt (what the server runs).

The front-end does this in the browser; scripts that talk to the server need it too. The names and
the order of a node's widgets come from the server's own ``/object_info``.

What this module does not do: subgraphs, reroutes and primitive nodes, which the pack's own
workflows do not use; it refuses them.
"""

from __future__ import annotations

from typing import Any

_NOTES = {"Note", "MarkdownNote"}
_MUTED, _BYPASSED = 2, 4
_WIDGET_TYPES = {"INT", "FLOAT", "STRING", "BOOLEAN", "COMBO", "FLOAT,INT"}
_SEED_NAMES = {"seed", "noise_seed"}


class GraphError(ValueError):
    """The graph cannot be turned into a prompt; the message names the node."""


def graph_to_prompt(graph: dict[str, Any], object_info: dict[str, Any]) -> dict[str, Any]:
    """Return the prompt of a graph.

    Args:
        graph: The parsed workflow file, version 0.4 (a list ``nodes`` and a list ``links``).
        object_info: The server's answer to ``GET /object_info``.

    Raises:
        GraphError: If a node is unknown to the server, or its widgets do not match the server's.
    """
    sources = {link[0]: [str(link[1]), link[2]] for link in graph["links"]}
    prompt = {}
    for node in graph["nodes"]:
        if node["type"] in _NOTES or node.get("mode", 0) == _MUTED:
            continue
        if node.get("mode", 0) == _BYPASSED:
            raise GraphError(f"node {node['id']} ({node['type']}) is bypassed; only muting is supported")
        if node["type"] not in object_info:
            raise GraphError(f"node {node['id']} has type {node['type']!r}, which this server does not have")
        inputs = _widget_inputs(node, object_info[node["type"]])
        for socket in node.get("inputs", []):
            if socket.get("link") is not None:
                inputs[socket["name"]] = sources[socket["link"]]
        prompt[str(node["id"])] = {
            "class_type": node["type"],
            "inputs": inputs,
            "_meta": {"title": node.get("title") or object_info[node["type"]]["display_name"]},
        }
    return prompt


def widget_names(info: dict[str, Any]) -> list[str | None]:
    """Return what each entry of a node's ``widgets_values`` is, in order.

    ``None`` stands for a widget that only the front-end knows: "control after generate" beside a
    seed, and the upload button beside an image.
    """
    names: list[str | None] = []
    for name, specification in _input_specifications(info):
        kind = specification[0]
        options = specification[1] if len(specification) > 1 else {}
        if not (isinstance(kind, list) or kind in _WIDGET_TYPES) or options.get("forceInput"):
            continue
        names.append(name)
        if options.get("control_after_generate", name in _SEED_NAMES and kind == "INT"):
            names.append(None)
        if options.get("image_upload"):
            names.append(None)
    return names


def _input_specifications(info: dict[str, Any]) -> list[tuple[str, Any]]:
    return [
        (name, info["input"][part][name])
        for part in ("required", "optional")
        for name in info.get("input_order", info["input"]).get(part, [])
    ]


def _widget_inputs(node: dict[str, Any], info: dict[str, Any]) -> dict[str, Any]:
    names, values = widget_names(info), node.get("widgets_values", [])
    if len(values) > len(names):
        raise GraphError(
            f"node {node['id']} ({node['type']}) has {len(values)} widget values, "
            f"but the server's node has {len(names)}: {names}"
        )
    # A newer ComfyUI may have added widgets at the end; like the front-end, give them their default.
    specifications = dict(_input_specifications(info))
    values = values + [default_value(specifications[name]) if name else None for name in names[len(values) :]]
    return {name: value for name, value in zip(names, values, strict=True) if name is not None}


def default_value(specification: list[Any]) -> Any:
    """Return what a new widget of this kind shows."""
    kind, options = specification[0], specification[1] if len(specification) > 1 else {}
    if "default" in options:
        return options["default"]
    choices = kind if isinstance(kind, list) else options.get("options", [])
    if choices:
        return choices[0]
    return {"INT": 0, "FLOAT": 0.0, "BOOLEAN": False}.get(kind, "")
