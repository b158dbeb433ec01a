"""Weights that newer ComfyUI keeps quantized: as plain tensors and a description, and back; and their parts.

Such models are built from ``comfy.ops.mixed_precision_ops`` and hold a weight as a ``QuantizedTensor``.
What a layout does to a layer's *input* decides how work may be shared without changing a number: a scale
that is fixed, or measured for each token, is the same on every rank; one measured over all tokens is not.
Weights of scaled fp8 have one scale and can be cut; the scales of the other layouts belong to rows or blocks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import comfy.ops
import torch
from torch import nn

from ..errors import RequestError
from ..parallel import ModelPlan, TensorPart, TensorShards, input_name, max_tensor_degree

OPERATIONS = "mixed_precision_ops"
_LINEAR = f"{OPERATIONS}.<locals>.MixedPrecisionOps.Linear"
_CUTTABLE = frozenset({"TensorCoreFP8Layout", "TensorCoreFP8E4M3Layout", "TensorCoreFP8E5M2Layout"})
_PER_TOKEN = frozenset({"TensorWiseINT8Layout", "TensorCoreMXFP8Layout"})
_FIXED_INPUT_ONLY = frozenset({"TensorCoreNVFP4Layout"})
_LAYOUTS = _CUTTABLE | _PER_TOKEN | _FIXED_INPUT_ONLY
# What loading a checkpoint sets on a layer, besides its parameters.
_ATTRIBUTES = ("quant_format", "layout_type", "_full_precision_mm", "_full_precision_mm_config")
_VALUES = ":values"
# Products of fp8 take sizes that are multiples of it (torch.nn.functional.scaled_mm).
_FP8_ALIGNMENT = 16


def is_mixed_linear(layer: nn.Module) -> bool:
    """Return whether a layer is a Linear that may hold a quantized weight."""
    return type(layer).__module__ == comfy.ops.__name__ and type(layer).__qualname__ == _LINEAR


def is_quantized(tensor: Any) -> bool:
    """Return whether a tensor is a ``QuantizedTensor`` of a layout that workers can hold."""
    return (
        type(tensor).__module__.startswith("comfy_kitchen.")
        and getattr(tensor, "_layout_cls", None) in _LAYOUTS
    )


def max_cut(module: nn.Module, plan: ModelPlan, *, most: int) -> int:
    """Return how many ranks, up to ``most``, may hold parts of a model's weights."""
    if find_uncuttable(module) is not None:
        return 1
    most = min(most, max_tensor_degree(module, plan))
    return next((tp - 1 for tp in range(2, most + 1) if find_unaligned(module, plan, tp) is not None), most)


def find_uncuttable(module: nn.Module) -> str | None:
    """Return which weight cannot be held in parts for how it is quantized, and why; None if there is none."""
    for path, layer in module.named_modules():
        weight: Any = layer._parameters.get("weight")
        for name, parameter in layer._parameters.items() if is_mixed_linear(layer) else ():
            if name not in ("weight", "bias") and parameter is not None and parameter.numel() > 1:
                return f"{path}.{name} holds a value for each channel"
        if not is_quantized(weight):
            continue
        if not is_mixed_linear(layer):
            return f"{path}.weight is quantized, but a {type(layer).__name__}"
        if weight._layout_cls not in _CUTTABLE:
            return f"{path}.weight is a {weight._layout_cls}, whose scales belong to rows or blocks"
        if any(scale.numel() > 1 for scale in _fields(weight)[0].values()):
            return f"{path}.weight is a {weight._layout_cls} with several scales"
    return None


def find_unaligned(module: nn.Module, plan: ModelPlan, degree: int) -> str | None:
    """Return which weight would be cut to a size that fp8 products do not take; None if there is none.

    Args:
        module: The model.
        plan: The plan of its class.
        degree: Ranks that share its weights.
    """
    multiplied = [
        path
        for path, layer in module.named_modules()
        if is_quantized(layer._parameters.get("weight")) and not getattr(layer, "_full_precision_mm", False)
    ]
    for rank in range(degree) if multiplied else ():
        parts = TensorShards(module, plan, degree=degree, rank=rank).parts
        for path in multiplied:
            part = parts.get(f"{path}.weight")
            if part is not None and part.local_size % _FP8_ALIGNMENT and not part.size % _FP8_ALIGNMENT:
                return f"{path}.weight would be cut to {part.local_size} of its {part.size} channels"
    return None


def check_sharing(module: nn.Module, *, plan: ModelPlan, tensor_degree: int) -> None:
    """Check that sharing the work of a model among ranks changes none of its numbers.

    Args:
        module: The diffusion model.
        plan: The plan of its class.
        tensor_degree: Ranks that share its weights.

    Raises:
        RequestError: Naming the weight and its layout.
    """
    uncut = find_uncuttable(module) if tensor_degree > 1 else None
    unaligned = find_unaligned(module, plan, tensor_degree) if tensor_degree > 1 and uncut is None else None
    if unaligned is not None:
        raise RequestError(
            f"{input_name('tp')}={tensor_degree} was asked, but {unaligned}",
            limit=f"GPUs multiply fp8 in multiples of {_FP8_ALIGNMENT} channels, and heads stay whole",
            way_out=f"Set {input_name('tp')} so that every worker's heads have such a width, or load an "
            "unquantized file",
        )
    if uncut is not None:
        raise RequestError(
            f"{input_name('tp')} above 1 was asked, but {uncut}",
            limit="Weights with one scale (fp8) can be cut",
            way_out=f"Set {input_name('tp')} to 1, or load an fp8 or unquantized file",
        )
    for path, layer in module.named_modules():
        weight = layer._parameters.get("weight")
        if not is_quantized(weight):
            continue
        layout = weight._layout_cls  # type: ignore[union-attr]
        if layout in _FIXED_INPUT_ONLY and getattr(layer, "input_scale", None) is None:
            raise RequestError(
                f"parallel sampling was asked, but {path}.weight is a {layout} without an input scale",
                limit="Its layer measures all tokens together, and each worker would see a part of them",
                way_out="Load a file with input scales, or an fp8 or unquantized file",
            )


def plain_tensors(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the tensors that one parameter is made of, by name; itself if it is not quantized."""
    if not is_quantized(tensor):
        return {name: tensor}
    scales, _ = _fields(tensor)
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


def cut(tensor: torch.Tensor, part: TensorPart) -> torch.Tensor | None:
    """Return a rank's part of a parameter, quantized or not; the scale stays that of the whole."""
    if not is_quantized(tensor):
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
