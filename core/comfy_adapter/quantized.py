"""Weights that ComfyUI keeps as scaled fp8: as plain tensors and a description, and back; and their parts.

Newer ComfyUI builds such models from ``comfy.ops.mixed_precision_ops`` and holds a weight as a
``QuantizedTensor``: fp8 values with one fp32 scale. Inputs are quantized with a fixed scale, so tokens, and
input channels too, can be shared among ranks without changing a number. Layouts whose scales belong to
blocks, or that measure each input (nvfp4, mxfp8, int8, ...), are not covered and refused by name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import comfy.ops
import torch
from torch import nn

from ..parallel import TensorPart

OPERATIONS = "mixed_precision_ops"
_LINEAR = f"{OPERATIONS}.<locals>.MixedPrecisionOps.Linear"
_LAYOUTS = frozenset({"TensorCoreFP8Layout", "TensorCoreFP8E4M3Layout", "TensorCoreFP8E5M2Layout"})
# What loading a checkpoint sets on a layer, besides its parameters.
_ATTRIBUTES = ("quant_format", "layout_type", "_full_precision_mm", "_full_precision_mm_config")
_VALUES = ":values"


def is_mixed_linear(layer: nn.Module) -> bool:
    """Return whether a layer is a Linear that may hold a quantized weight."""
    return type(layer).__module__ == comfy.ops.__name__ and type(layer).__qualname__ == _LINEAR


def is_scaled_fp8(tensor: Any) -> bool:
    """Return whether a tensor is a ``QuantizedTensor`` of fp8 values with one scale."""
    return (
        type(tensor).__module__.startswith("comfy_kitchen.")
        and getattr(tensor, "_layout_cls", None) in _LAYOUTS
        and tensor._params.scale.numel() == 1
        and tensor._qdata.shape == tensor.shape
    )


def plain_tensors(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the tensors that one parameter is made of, by name; itself if it is not quantized."""
    if not is_scaled_fp8(tensor):
        return {name: tensor}
    return {f"{name}{_VALUES}": tensor._qdata, f"{name}:scale": tensor._params.scale}  # type: ignore[attr-defined]


def describe_layers(module: nn.Module) -> dict[str, Any]:
    """Return what a worker needs to make the mixed-precision layers of a model from plain tensors."""
    layers: dict[str, Any] = {}
    arguments: dict[str, Any] = {}
    named: Any = module.named_modules()
    for path, layer in named:
        if not is_mixed_linear(layer):
            continue
        arguments = {
            "compute_dtype": layer.factory_kwargs["dtype"],
            "disabled": sorted(layer._disabled_formats),
        }
        layers[path] = {
            "attributes": {name: getattr(layer, name) for name in _ATTRIBUTES if hasattr(layer, name)},
            "parameters": {
                name: _describe(parameter)
                for name, parameter in layer._parameters.items()
                if parameter is not None
            },
        }
    return {"arguments": arguments, "layers": layers}


def make_operations(description: Mapping[str, Any]) -> Any:
    """Return the class of layers from which a model with mixed precision is built.

    Args:
        description: The message of ``describe_layers``.
    """
    arguments = description["arguments"]
    # Which layers are quantized is told by their own weights; the table of formats is not read again.
    return comfy.ops.mixed_precision_ops({}, arguments["compute_dtype"], disabled=set(arguments["disabled"]))


def restore_layers(
    module: nn.Module, description: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Give the layers of an empty model their parameters, which it has not had since it was built.

    Args:
        module: The model, built with ``make_operations``.
        description: The message of ``describe_layers``.
        tensors: Plain tensors by name.

    Returns:
        The tensors by the names of parameters and buffers: quantized weights put together.
    """
    joined = dict(tensors)
    for path, entry in description["layers"].items():
        layer = module.get_submodule(path)
        for name, value in entry["attributes"].items():
            setattr(layer, name, value)
        for name, quantized in entry["parameters"].items():
            full = f"{path}.{name}"
            if quantized is not None:
                values, scale = joined.pop(f"{full}{_VALUES}"), joined.pop(f"{full}:scale")
                joined[full] = _join(values, scale, quantized)
            layer._parameters[name] = nn.Parameter(joined[full], requires_grad=False)
    return joined


def cut(tensor: torch.Tensor, part: TensorPart) -> torch.Tensor | None:
    """Return a rank's part of a parameter, quantized or not; the scale stays that of the whole."""
    if not is_scaled_fp8(tensor):
        return part.take(tensor)
    values = part.take(tensor._qdata)  # type: ignore[attr-defined]
    if values is None:
        return None
    params = dataclasses.replace(tensor._params, orig_shape=tuple(values.shape))  # type: ignore[attr-defined]
    return type(tensor)(values.contiguous(), tensor._layout_cls, params)  # type: ignore[call-arg, attr-defined]


def requantize(weight: torch.Tensor, values: torch.Tensor, seed: int) -> torch.Tensor:
    """Return changed values quantized as ``weight`` is, by what ComfyUI's layer does (``set_weight``)."""
    changed: Any = weight.requantize_from_float(  # type: ignore[operator]
        values, scale="recalculate", stochastic_rounding=seed, inplace_ops=True
    )
    return changed.to(weight.dtype)


def _describe(parameter: torch.Tensor) -> dict[str, Any] | None:
    if not is_scaled_fp8(parameter):
        return None
    params = parameter._params  # type: ignore[attr-defined]
    return {"layout": parameter._layout_cls, "dtype": params.orig_dtype}  # type: ignore[attr-defined]


def _join(values: torch.Tensor, scale: torch.Tensor, quantized: Mapping[str, Any]) -> torch.Tensor:
    from comfy.quant_ops import QuantizedTensor, get_layout_class  # newer ComfyUI only

    layout = get_layout_class(quantized["layout"])
    params = layout.Params(scale=scale, orig_dtype=quantized["dtype"], orig_shape=tuple(values.shape))
    return QuantizedTensor(values, quantized["layout"], params)
