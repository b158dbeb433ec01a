"""Tiny MODELs whose block weights are scaled fp8, loaded as newer ComfyUI loads such files."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import nn

from .tiny_patchers import PATCHERS


def scaled_fp8_patcher(kind: str, layout: str = "float8_e4m3fn") -> Any:
    """Return a MODEL of one kind in fp32 with the Linear layers of its blocks quantized."""
    import comfy.model_patcher

    plain = PATCHERS[kind].build().model
    settings = type(plain.model_config)(dict(plain.model_config.unet_config))
    settings.quant_config = {"mixed_ops": True}
    with torch.inference_mode():
        settings.set_inference_dtype(torch.float32, torch.float32)
        model = settings.get_model({}, "")
        model.diffusion_model.load_state_dict(_checkpoint(plain.diffusion_model, layout))
        cpu = torch.device("cpu")
        return comfy.model_patcher.ModelPatcher(model, load_device=cpu, offload_device=cpu)


def _checkpoint(module: nn.Module, layout: str) -> dict[str, torch.Tensor]:
    """Return the state dict with one scale for each block's weight, and for some an input scale."""
    state = dict(module.state_dict())
    for number, (path, layer) in enumerate(module.named_modules()):
        if not isinstance(layer, nn.Linear) or "blocks" not in path:
            continue
        dtype = getattr(torch, layout)
        scale = layer.weight.abs().amax() / torch.finfo(dtype).max
        state[f"{path}.weight"] = (layer.weight / scale).to(dtype)
        state[f"{path}.weight_scale"] = scale
        form = json.dumps({"format": layout}).encode()
        state[f"{path}.comfy_quant"] = torch.tensor(list(form), dtype=torch.uint8)
        if number % 2:
            state[f"{path}.input_scale"] = torch.tensor(0.02)
    return state
