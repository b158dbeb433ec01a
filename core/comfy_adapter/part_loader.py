"""Load a module into the workers when ComfyUI's memory manager loads it, as it does before each use."""

from __future__ import annotations

from typing import Any

import torch

from .remote_patcher import RemotePatcher
from .worker_groups import acquire_group, check_room, load_part
from .worker_memory import worker_memory
from .worker_parts import WorkerPart


class WorkersPart(torch.nn.Module):
    """The patcher's stand-in for a model; its class name appears in ComfyUI's log."""


class PartLoader(RemotePatcher):
    """A ``ModelPatcher`` of nothing, for one use.

    Args:
        part: What the workers get.
        devices: Of the workers.
        patcher: The module's own patcher, whose devices count.
    """

    def __init__(self, part: WorkerPart, devices: tuple[str, ...], patcher: Any) -> None:
        super().__init__(WorkersPart(), patcher.load_device, patcher.offload_device, size=0)
        self.part = part
        self.devices = devices

    def get_nested_additional_models(self) -> list:
        """Return what ComfyUI loads together with this; the workers' copy."""
        return [worker_memory(self.part, self)]

    def partially_load(
        self, device_to: Any, extra_memory: float = 0, force_patch_weights: bool = False
    ) -> int:
        """Start the workers if need be and give them the module."""
        needs = check_room(self.part, self.devices)
        load_part(acquire_group(self.devices, parts=[self.part]), self.part, {}, None, needs=needs)
        return 0

    def unpatch_model(self, device_to: Any = None, unpatch_weights: bool = True) -> None:
        """Do nothing."""
