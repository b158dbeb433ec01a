"""Show the workers' copy of a model to ComfyUI's memory manager as a loaded model of its own.

The copy outlives the patcher that asked for it (Parallel Sampler makes a new one in every run), and
the base MODEL may be loaded in this process at the same time. An entry of its own lets ComfyUI count
it, evict it when memory is short, and free it when the user asks to unload all models.
"""

from __future__ import annotations

import weakref
from typing import Any

import comfy.model_patcher
import torch

from .worker_groups import loaded_bytes, model_token, unload_model
from .worker_parts import WorkerPart

_entries: weakref.WeakKeyDictionary[Any, WorkerMemory] = weakref.WeakKeyDictionary()


class ParallelWorkers(torch.nn.Module):
    """The entry's stand-in for a model; its class name appears in ComfyUI's log."""


class WorkerMemory(comfy.model_patcher.ModelPatcher):
    """A ``ModelPatcher`` that moves nothing and frees the workers' copy of one model.

    Args:
        token: The model's number in ``worker_groups``.
        size: Bytes of its weights.
        load_device: Where ComfyUI counts them.
        offload_device: Where ComfyUI counts them while they are not loaded.
    """

    def __init__(
        self, token: int, size: int, load_device: torch.device, offload_device: torch.device
    ) -> None:
        super().__init__(ParallelWorkers(), load_device, offload_device, size=size)
        self.token = token

    def is_dynamic(self) -> bool:
        """Tell ComfyUI that this patcher has no dynamic VRAM."""
        return False

    def loaded_size(self) -> int:
        """Return the bytes of weights in each worker."""
        return loaded_bytes(self.token)

    def current_loaded_device(self) -> torch.device:
        """Return where the weights count."""
        return self.load_device if self.loaded_size() else self.offload_device

    def partially_load(
        self, device_to: Any, extra_memory: float = 0, force_patch_weights: bool = False
    ) -> int:
        """Do nothing: the parallel MODEL loads the workers."""
        return 0

    def partially_unload(
        self, device_to: Any, memory_to_free: float = 0, force_patch_weights: bool = False
    ) -> int:
        """Free the workers' copy and return the bytes that each held."""
        return unload_model(self.token)

    def unpatch_model(self, device_to: Any = None, unpatch_weights: bool = True) -> None:
        """Free the workers' copy if ComfyUI unloads the model (``unpatch_weights``)."""
        if unpatch_weights:
            unload_model(self.token)


def worker_memory(part: WorkerPart, patcher: comfy.model_patcher.ModelPatcher) -> WorkerMemory:
    """Return the entry of what workers hold; it lives as long as its owner.

    Args:
        part: What they hold.
        patcher: Whose devices count.
    """
    owner = part.owner
    if owner not in _entries:
        token = model_token(owner)
        _entries[owner] = WorkerMemory(token, part.num_bytes, patcher.load_device, patcher.offload_device)
    _entries[owner].size = part.num_bytes  # other degrees hold other parts
    return _entries[owner]
