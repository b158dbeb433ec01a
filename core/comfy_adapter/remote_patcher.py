"""What ComfyUI's memory manager is told of a model whose weights live in the workers: nothing is here."""

from __future__ import annotations

from typing import Any

import comfy.model_patcher


class RemotePatcher(comfy.model_patcher.ModelPatcher):
    """A ``ModelPatcher`` that holds nothing on a GPU of this process; the workers' weights have own entries.

    The entries are those of ``worker_memory``.
    """

    def is_dynamic(self) -> bool:
        """Tell ComfyUI that this patcher has no dynamic VRAM."""
        return False

    def model_size(self) -> int:
        """Return 0: the weights count where they are."""
        return 0

    def loaded_size(self) -> int:
        """Return 0; see ``model_size``."""
        return 0

    def get_ram_usage(self) -> int:
        """Return the bytes of weights in this process' memory (0.3.75 asks for its cache)."""
        return super().model_size()

    def partially_unload(
        self, device_to: Any, memory_to_free: float = 0, force_patch_weights: bool = False
    ) -> int:
        """Return 0: nothing is loaded in this process."""
        return 0
