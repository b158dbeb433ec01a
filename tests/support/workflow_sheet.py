"""Nodes in columns, for graphs that are written by a script and read by people."""

from __future__ import annotations

from typing import Any

from .graph_builder import GraphBuilder, Output
from .workflow_models import ModelFile

_WIDTH_PX, _COLUMN_PX, _GAP_PX, _TITLE_PX = 340, 400, 46, 30
# The front-end makes a node as high as its widgets need; these have more than rows of one line.
_HEIGHTS_PX = {
    "CLIPTextEncode": 170, "TextEncodeQwenImageEdit": 210, "TextEncodeQwenImageEditPlus": 250,
    "LoadImage": 350, "FerryParallelSampler": 640, "FerryParallelModel": 390, "KSampler": 300,
    "KSamplerAdvanced": 360, "SaveImage": 340, "SaveVideo": 340, "FerryLoadTrainingFolder": 420,
    "FerryLoadDiffusionModelOffload": 296, "FerryOffloadModel": 230, "FerryTrainLoraOffload": 860,
    "FerryCacheTrainingData": 170, "LossGraphNode": 380,
}  # fmt: skip


# A higher column goes on beside itself: on a screen of 1080 lines the whole graph stays readable.
_HIGHEST_PX = 1200


class Sheet:
    """A graph that is filled column by column.

    Attributes:
        builder: What collects the nodes.
    """

    def __init__(self, object_info: dict[str, Any]) -> None:
        self.builder = GraphBuilder(object_info)
        self._column = 0
        self._members: dict[int, list[dict[str, Any]]] = {}
        self._frames: dict[int, tuple[int, int, int]] = {}

    def column(self, number: int) -> None:
        """Go on below what stands in that column."""
        self._column = number

    def add(self, kind: str, /, *, files: tuple[ModelFile, ...] = (), **values: Any) -> list[Output]:
        """Add a node of that class at the foot of the column.

        Args:
            kind: The node's class.
            files: What a loader loads; ComfyUI offers to download those that are missing.
            **values: As for ``GraphBuilder.add``.
        """
        outputs = self.builder.add(kind, (0, 0), **values)
        node = self.builder.nodes[-1]
        width, height = node["size"][0], _HEIGHTS_PX.get(kind, node["size"][1])
        node["size"] = [max(width, _WIDTH_PX), height]
        if files:
            node["properties"]["models"] = [
                {"name": file.name, "url": file.url, "directory": file.directory} for file in files
            ]
        self._members.setdefault(self._column, []).append(node)
        return outputs

    def note(self, text: str, height: int) -> None:
        """Add a note at the foot of the column."""
        self.builder.note(text, (0, 0), (_WIDTH_PX, height))
        self._members.setdefault(self._column, []).append(self.builder.nodes[-1])

    def arrange(self) -> None:
        """Give every node its place, once all are there."""
        left = 0
        for column in sorted(self._members):
            start, y, bottom = left, 0, 0
            for node in self._members[column]:
                height = node["size"][1]
                if y and y + height > _HIGHEST_PX:
                    left, y = left + _COLUMN_PX, 0
                node["pos"] = [left, y]
                y += height + _TITLE_PX + _GAP_PX
                bottom = max(bottom, y)
            left += _COLUMN_PX
            self._frames[column] = (start, left, bottom)

    def group(self, title: str, first: int, last: int, colour: str) -> None:
        """Frame the columns ``first`` to ``last`` of an arranged sheet."""
        left, right = self._frames[first][0] - 20, self._frames[last][1] - 40
        bottom = max(self._frames[column][2] for column in range(first, last + 1))
        self.builder.group(title, (left, -80, right - left, bottom + 80), colour)
