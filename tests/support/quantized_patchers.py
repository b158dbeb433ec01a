"""Tiny MODELs whose block weights are quantized, loaded as newer ComfyUI loads such files."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import nn

from .tiny_patchers import PATCHERS


def quantized_patcher(
    kind: str,
    form: str = "float8_e4m3fn",
    *,
    input_scales: bool = True,
    dtype: torch.dtype = torch.float32,
    load_device: str = "cpu",
    **changes: Any,
) -> Any:
    """Return a MODEL of one kind with the Linear layers of its blocks quantized.

    Args:
        kind: Of ``PATCHERS``.
        form: A name of ``comfy.quant_ops.QUANT_ALGOS``, or "int8 by channels" (a scale for each row).
        input_scales: Whether every second layer has one for its input (all of them in nvfp4).
        dtype: Of the rest, and of all arithmetic.
        load_device: Where it computes.
        changes: Of the network's configuration.
    """
    import comfy.model_patcher

    plain = PATCHERS[kind].build(**changes).model
    settings = type(plain.model_config)(dict(plain.model_config.unet_config))
    settings.quant_config = {"mixed_ops": True}
    with torch.inference_mode():
        settings.set_inference_dtype(dtype, dtype)
        model = settings.get_model({}, "")
        model.diffusion_model.load_state_dict(quantized_state(plain.diffusion_model, form, input_scales))
        return comfy.model_patcher.ModelPatcher(
            model, load_device=torch.device(load_device), offload_device=torch.device("cpu")
        )


def quantized_state(module: nn.Module, form: str, input_scales: bool = True) -> dict[str, torch.Tensor]:
    """Return a model's weights as a file holds them in which the blocks' Linear layers are quantized."""
    from comfy.quant_ops import QUANT_ALGOS, QuantizedTensor

    more = {"per_channel": True} if form == "int8 by channels" else {}
    form = "int8_tensorwise" if more else form
    state = dict(module.state_dict())
    for number, (path, layer) in enumerate(module.named_modules()):
        if not isinstance(layer, nn.Linear) or "block" not in path:
            continue
        weight = QuantizedTensor.from_float(
            layer.weight.detach(), QUANT_ALGOS[form]["comfy_tensor_layout"], scale="recalculate", **more
        )
        state.update(weight.state_dict(f"{path}.weight"))
        text = json.dumps({"format": form}).encode()
        state[f"{path}.comfy_quant"] = torch.tensor(list(text), dtype=torch.uint8)
        if (
            input_scales
            and "input_scale" in QUANT_ALGOS[form]["parameters"]
            and (number % 2 or form == "nvfp4")
        ):
            state[f"{path}.input_scale"] = torch.tensor(0.02)
    return state
