"""How ComfyUI adds a patch to a weight, where its versions differ in the names."""

from __future__ import annotations

import comfy.model_management
import comfy.utils
import torch


def lora_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype in which ComfyUI adds LoRA to weights; 0.3.75 always used fp32."""
    choose = getattr(comfy.model_management, "lora_compute_dtype", None)
    return torch.float32 if choose is None else choose(device)


def rounding_seed(key: str) -> int:
    """Return the seed of a patched weight's stochastic rounding."""
    if hasattr(comfy.utils, "string_to_seed"):
        return comfy.utils.string_to_seed(key)
    from comfy.model_patcher import string_to_seed  # where 0.3.75 keeps it

    return string_to_seed(key)
