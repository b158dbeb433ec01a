"""Nodes in columns, for graphs that are written by a script and read by people."""

from __future__ import annotations

from typing import Any

from .graph_builder import GraphBuilder, Output
from .workflow_models import ModelFile

_WIDTH_PX, _COLUMN_PX, _GAP_PX, _TITLE_PX = 340, 400, 46, 30
# The front-end makes a node as high as its widgets need; these have more than rows of one line.
_HEIGHTS_PX = {
    "CLIPTextEncode": 170, "TextEncodeQwenImageEdit": 210, "TextEncodeQwenImageEditPlus": 250,
    "LoadImage": 330, "FerryParallelSampler": 560, "FerryParallelModel": 300, "KSampler": 300,
    "KSamplerAdvanced": 360, "SaveImage": 340, "SaveVideo": 340, "FerryLoadTrainingFolder": 420,
    "FerryLoadDiffusionModelOffload": 250, "FerryOffloadModel": 200, "FerryTrainLoraOffload": 1270,
    "FerryCacheTrainingData": 170, "LossGraphNode": 380,
}  # fmt: skip


class Sheet:
    """A graph that is filled column by column.

    Attributes:
        builder: What collects the nodes.
    """

    def __init__(self, object_info: dict[str, Any]) -> None:
        self.builder = GraphBuilder(object_info)
        self._column, self._next_y = 0, 0
        self._columns: dict[int, int] = {}

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
        outputs = self.builder.add(kind, self._place(), **values)
        node = self.builder.nodes[-1]
        width, height = node["size"][0], _HEIGHTS_PX.get(kind, node["size"][1])
        node["size"] = [max(width, _WIDTH_PX), height]
        if files:
            node["properties"]["models"] = [
                {"name": file.name, "url": file.url, "directory": file.directory} for file in files
            ]
        self._advance(height)
        return outputs

    def note(self, text: str, height: int) -> None:
        """Add a note at the foot of the column."""
        self.builder.note(text, self._place(), (_WIDTH_PX, height))
        self._advance(height)

    def group(self, title: str, first: int, last: int, colour: str) -> None:
        """Frame the columns ``first`` to ``last``."""
        left = first * _COLUMN_PX - 20
        bottom = max(self._columns.get(column, 0) for column in range(first, last + 1))
        size = (left, -80, (last - first + 1) * _COLUMN_PX - 20, bottom + 80)
        self.builder.group(title, size, colour)

    def _place(self) -> tuple[int, int]:
        return self._column * _COLUMN_PX, self._columns.get(self._column, 0)

    def _advance(self, height: int) -> None:
        self._columns[self._column] = self._columns.get(self._column, 0) + height + _TITLE_PX + _GAP_PX
