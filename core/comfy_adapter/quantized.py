"""Weights that newer ComfyUI keeps quantized: as plain tensors and a description, and back.

Such models are built from ``comfy.ops.mixed_precision_ops`` and hold a weight as a ``QuantizedTensor``. Their
parts are in ``quantized_parts``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import comfy.ops
import torch
from torch import nn

from . import packed_weights

OPERATIONS = "mixed_precision_ops"
_LINEAR = f"{OPERATIONS}.<locals>.MixedPrecisionOps.Linear"
INT8_LAYOUT = "TensorWiseINT8Layout"
MXFP8_LAYOUT = "TensorCoreMXFP8Layout"
NVFP4_LAYOUT = "TensorCoreNVFP4Layout"
_FP8_LAYOUTS = ("TensorCoreFP8Layout", "TensorCoreFP8E4M3Layout", "TensorCoreFP8E5M2Layout")
_LAYOUTS = frozenset({*_FP8_LAYOUTS, INT8_LAYOUT, MXFP8_LAYOUT, NVFP4_LAYOUT})
# What loading a checkpoint sets on a layer, besides its parameters.
_ATTRIBUTES = ("quant_format", "layout_type", "_full_precision_mm", "_full_precision_mm_config")
_VALUES = ":values"


def is_mixed_linear(layer: nn.Module) -> bool:
    """Return whether a layer is a Linear that may hold a quantized weight."""
    return type(layer).__module__ == comfy.ops.__name__ and type(layer).__qualname__ == _LINEAR


def is_quantized(tensor: Any) -> bool:
    """Return whether a tensor is a ``QuantizedTensor`` of a layout that workers can hold."""
    return (
        type(tensor).__module__.startswith("comfy_kitchen.")
        and getattr(tensor, "_layout_cls", None) in _LAYOUTS
    )


def plain_tensors(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the tensors that one parameter is made of, by name; itself if it is not quantized."""
    if not is_quantized(tensor):
        return packed_weights.plain_tensors(name, tensor)
    scales = scales_of(tensor)
    values = {f"{name}{_VALUES}": tensor._qdata}  # type: ignore[attr-defined]
    return values | {f"{name}:{field}": scale for field, scale in scales.items()}


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


def fill_layers(module: nn.Module, description: Mapping[str, Any]) -> None:
    """Give the layers of an empty model stand-ins on the meta device for the parameters that they lack.

    ComfyUI's class makes them when it loads a file. A quantized value is counted as one byte.
    """
    for path, entry in description["layers"].items():
        layer: Any = module.get_submodule(path)
        for name, quantized in entry["parameters"].items():
            if name in layer._parameters:
                continue
            shape = layer._orig_shape if name == "weight" else ()
            dtype = layer.factory_kwargs["dtype"] if quantized is None else torch.float8_e4m3fn
            empty = torch.empty(shape, dtype=dtype, device="meta")
            layer._parameters[name] = nn.Parameter(empty, requires_grad=False)


def restore_layers(
    module: nn.Module, description: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Give the layers of an empty model their parameters.

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
                joined[full] = _join(full, joined, quantized)
            layer._parameters[name] = nn.Parameter(joined[full], requires_grad=False)
    return joined


def requantize(weight: torch.Tensor, values: torch.Tensor, seed: int) -> torch.Tensor:
    """Return changed values quantized as ``weight`` is, by what ComfyUI's layer does (``set_weight``)."""
    changed: Any = weight.requantize_from_float(  # type: ignore[operator]
        values, scale="recalculate", stochastic_rounding=seed, inplace_ops=True
    )
    return changed.to(weight.dtype)


def scales_of(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the tensors that a quantized tensor's layout keeps besides its values, by name."""
    return _fields(tensor)[0]


def _describe(parameter: torch.Tensor) -> dict[str, Any] | None:
    if not is_quantized(parameter):
        return None
    scales, numbers = _fields(parameter)
    return {"layout": parameter._layout_cls, "scales": sorted(scales), "numbers": numbers}  # type: ignore[attr-defined]


def _fields(tensor: torch.Tensor) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the tensors and the other values that a quantized tensor's layout keeps, by name."""
    params = tensor._params  # type: ignore[attr-defined]
    values = {field.name: getattr(params, field.name) for field in dataclasses.fields(params)}
    scales = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
    return scales, {name: value for name, value in values.items() if name not in scales}


def _join(name: str, tensors: dict[str, torch.Tensor], quantized: Mapping[str, Any]) -> torch.Tensor:
    """Return the quantized tensor, taking what it is made of out of ``tensors``."""
    from comfy.quant_ops import QuantizedTensor, get_layout_class  # newer ComfyUI only

    scales = {field: tensors.pop(f"{name}:{field}") for field in quantized["scales"]}
    numbers = dict(quantized["numbers"])
    numbers["orig_shape"] = tuple(numbers["orig_shape"])
    params = get_layout_class(quantized["layout"]).Params(**scales, **numbers)
    return QuantizedTensor(tensors.pop(f"{name}{_VALUES}"), quantized["layout"], params)
