"""Write graphs in the format that the canvas saves and loads, with the widgets in the server's order."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .graph_to_prompt import default_value, widget_names

_WIDTH_PX, _LINE_PX, _TITLE_PX = 320, 26, 30


@dataclass(frozen=True)
class Output:
    """One output of a node that was added, to be given as another node's input."""

    node_id: int
    slot: int
    kind: str


@dataclass
class GraphBuilder:
    """Collects nodes, links, notes and groups.

    Attributes:
        object_info: The server's answer to ``GET /object_info``.
    """

    object_info: dict[str, Any]
    nodes: list[dict[str, Any]] = field(default_factory=list)
    links: list[list[Any]] = field(default_factory=list)
    groups: list[dict[str, Any]] = field(default_factory=list)

    def add(
        self,
        kind: str,
        position: tuple[int, int],
        /,
        *,
        node_title: str = "",
        node_size: tuple[int, int] | None = None,
        **values: Any,
    ) -> list[Output]:
        """Add a node; values are widget values or `Output`. Widgets not named keep their default.

        Returns:
            The node's outputs in order.
        """
        info, node_id = self.object_info[kind], len(self.nodes) + 1
        specifications = {
            name: specification
            for part in ("required", "optional")
            for name, specification in info["input"].get(part, {}).items()
        }
        unknown = values.keys() - specifications.keys()
        if unknown:
            raise ValueError(f"{kind} has no inputs {sorted(unknown)}; it has {sorted(specifications)}")
        names = widget_names(info)
        inputs = []
        for name, specification in specifications.items():
            value = values.get(name)
            if name in names and not isinstance(value, Output):
                continue
            link = None
            if isinstance(value, Output):
                link = len(self.links) + 1
                self.links.append([link, value.node_id, value.slot, node_id, len(inputs), value.kind])
                source = self.nodes[value.node_id - 1]["outputs"][value.slot]
                source["links"] = [*(source["links"] or []), link]
            socket = {"name": name, "type": specification[0], "link": link}
            if name in names:
                socket["widget"] = {"name": name}
            inputs.append(socket)
        outputs = [
            {"name": info["output_name"][slot], "type": output, "links": None, "slot_index": slot}
            for slot, output in enumerate(info["output"])
        ]
        rows = max(len(inputs), len(outputs)) + len(names)
        node = {
            "id": node_id,
            "type": kind,
            "pos": list(position),
            "size": list(node_size or (_WIDTH_PX, _LINE_PX * rows + _TITLE_PX)),
            "flags": {},
            "order": node_id - 1,
            "mode": 0,
            "inputs": inputs,
            "outputs": outputs,
            "properties": {"Node name for S&R": kind},
            "widgets_values": self._widgets(names, specifications, values),
        }
        if node_title:
            node["title"] = node_title
        self.nodes.append(node)
        return [Output(node_id, slot, output) for slot, output in enumerate(info["output"])]

    def note(self, text: str, position: tuple[int, int], size: tuple[int, int]) -> None:
        """Add a note for the reader; the server never sees it."""
        node_id = len(self.nodes) + 1
        self.nodes.append(
            {
                "id": node_id,
                "type": "MarkdownNote",
                "pos": list(position),
                "size": list(size),
                "flags": {},
                "order": node_id - 1,
                "mode": 0,
                "inputs": [],
                "outputs": [],
                "properties": {},
                "widgets_values": [text],
                "color": "#432",
                "bgcolor": "#653",
            }
        )

    def group(self, title: str, bounding: tuple[int, int, int, int], colour: str) -> None:
        """Draw a titled frame ``(x, y, width, height)`` behind the nodes."""
        self.groups.append(
            {
                "id": len(self.groups) + 1,
                "title": title,
                "bounding": list(bounding),
                "color": colour,
                "font_size": 24,
                "flags": {},
            }
        )

    def graph(self) -> dict[str, Any]:
        """Return the whole graph, ready to be saved as JSON."""
        return {
            "id": "00000000-0000-4000-8000-000000000001",
            "revision": 0,
            "last_node_id": len(self.nodes),
            "last_link_id": len(self.links),
            "nodes": self.nodes,
            "links": self.links,
            "groups": self.groups,
            "config": {},
            "extra": {},
            "version": 0.4,
        }

    @staticmethod
    def _widgets(
        names: list[str | None], specifications: dict[str, Any], values: dict[str, Any]
    ) -> list[Any]:
        widgets: list[Any] = []
        for index, name in enumerate(names):
            if name is None:  # beside a seed, or beside an image
                previous = specifications[names[index - 1]]
                widgets.append("fixed" if previous[0] == "INT" else "image")
                continue
            value = values.get(name)
            widgets.append(
                default_value(specifications[name]) if value is None or isinstance(value, Output) else value
            )
        return widgets
