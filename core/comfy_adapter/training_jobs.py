"""The jobs of a process that helps to train, see ``training_helpers``.

Imported in the helper's process only; ComfyUI's settings are put in place before its modules are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from .jobs import set_up_comfyui

if TYPE_CHECKING:
    from .training_worker import TrainingWorker


def register(context: Any, arguments: Mapping[str, Any]) -> dict[str, Callable]:
    """Set ComfyUI up in this process and return the jobs by name.

    Args:
        context: The ``WorkerContext``.
        arguments: ``model_export.comfyui_arguments`` of the parent.

    Returns:
        ``load`` and ``gradients``.
    """
    set_up_comfyui(arguments, cpu=context.device.type == "cpu")
    jobs = _Jobs(context)
    return {job.__name__: job for job in (jobs.load, jobs.gradients)}


class _Jobs:
    def __init__(self, context: Any) -> None:
        self.context = context
        self.worker: TrainingWorker | None = None

    def load(self, message: Mapping[str, Any]) -> None:
        from .training_worker import TrainingWorker

        self.worker = TrainingWorker(message, device=self.context.device)

    def gradients(
        self, names: list[str], weights: torch.Tensor, micro_steps: list[list[dict[str, Any]]], divisor: int
    ) -> dict[str, Any]:
        assert self.worker is not None, "load() comes first"
        self.worker.set_weights(names, weights)
        return self.worker.share(names, micro_steps, divisor=divisor)
