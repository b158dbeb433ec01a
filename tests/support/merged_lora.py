"""What ComfyUI makes of a LoRA."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def merged(model: Any, lora: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the weights with a LoRA that ComfyUI's own loader applied; the model stays as it is."""
    import comfy.sd

    with torch.inference_mode():
        patched, _ = comfy.sd.load_lora_for_models(model, None, dict(lora), 1.0, 0.0)
        patched.patch_model(device_to=torch.device("cpu"))
        weights = {name: value.clone() for name, value in model.model.state_dict().items()}
        patched.unpatch_model(torch.device("cpu"))
    return weights
