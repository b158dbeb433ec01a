"""A stand-in for the recording of CUDA graphs, on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from comfyui_ferry.core.comfy_adapter.nested import map_tensors


class Recorder:
    """Records as CUDA does: a replay computes from the memory of the recording into its output."""

    def __init__(self) -> None:
        self.num_recordings = 0

    def __call__(self, call: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """Return what runs the call again, and where its output will be."""
        self.num_recordings += 1
        outputs: list[Any] = []
        whole = map_tensors(call(), lambda tensor: outputs.append(tensor.zero_()) or tensor)

        def replay() -> None:
            again: list[Any] = []
            map_tensors(call(), lambda tensor: again.append(tensor) or tensor)
            for output, tensor in zip(outputs, again, strict=True):
                output.copy_(tensor)

        return replay, whole
