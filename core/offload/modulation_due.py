"""Inputs for which modulation layers still have to compute: each does when the model calls it next.

What this module does not do: it computes nothing and stores no output.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from .modulation_layers import CachedLayer
    from .modulation_store import InputKey


class DueInputs:
    """For each layer, the inputs that wait for it."""

    def __init__(self) -> None:
        self._by_layer: dict[int, dict[InputKey, Tensor]] = {}

    def add(self, layer: CachedLayer, arguments: Mapping[InputKey, Tensor]) -> None:
        """Have inputs wait for a layer."""
        if arguments:
            self._by_layer.setdefault(id(layer), {}).update(arguments)

    def take(self, layer: CachedLayer) -> dict[InputKey, Tensor]:
        """Return what waits for a layer; nothing does any more."""
        return self._by_layer.pop(id(layer), {})

    def waited_for(self, layers: Iterable[CachedLayer]) -> list[CachedLayer]:
        """Return those of the layers that something waits for."""
        return [layer for layer in layers if id(layer) in self._by_layer]

    def clear(self) -> None:
        """Let nothing wait."""
        self._by_layer.clear()
