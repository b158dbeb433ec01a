"""A text encoder inside a worker: this rank's part of its weights, and the calls that ComfyUI makes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..parallel import ModelPlan
from ..plans import find_text_encoder_plan
from .empty_model import build_empty_encoder
from .nested import map_tensors
from .worker_model import WorkerModel


class WorkerEncoder(WorkerModel):
    """One rank's part of a text encoder's transformer; loaded and patched as a denoiser is."""

    @staticmethod
    def _build(description: Mapping[str, Any]) -> nn.Module:
        return build_empty_encoder(description)

    @staticmethod
    def _find_plan(path: str) -> ModelPlan:
        return find_text_encoder_plan(path)

    def call(self, arguments: Mapping[str, Any]) -> Any:
        """Run a method of the transformer; all ranks call it together.

        Args:
            arguments: ``method``, ``args`` and ``kwargs``, tensors on any device; an argument ``device``
                becomes this rank's.

        Returns:
            What it returns, on the CPU; None but on the first rank.
        """
        args, kwargs = map_tensors(
            (arguments["args"], arguments["kwargs"]), lambda tensor: tensor.to(self.device)
        )
        if "device" in kwargs:
            kwargs["device"] = self.device
        with torch.inference_mode():
            output = getattr(self.module, arguments["method"])(*args, **kwargs)
            with self.progress.waiting():
                return map_tensors(output, lambda tensor: tensor.cpu()) if self.layout.speaks else None
