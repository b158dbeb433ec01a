"""How ComfyUI adds a patch to a weight, and to which, where its versions differ in the names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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


def patched_by_loading(model: Any, patches: Mapping[str, Any]) -> dict[str, Any]:
    """Return the patches that ComfyUI applies when it loads a model.

    Those of a module's own weights beside weights of its children it leaves out (``_load_list``), such as
    Wan's ``modulation``: merges have them for every weight, and some LoRAs too.
    """
    applied = {}
    for key, entries in patches.items():
        owner = model.get_submodule(key.rpartition(".")[0])
        own = {name for name, _ in owner.named_parameters(recurse=False)}
        if all(name in own for name, _ in owner.named_parameters()):
            applied[key] = entries
    return applied
