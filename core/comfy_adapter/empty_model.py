"""A model as a message describes it: built empty, and its weights put together for it."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import comfy.ops
import torch
from torch import nn

from . import packed_weights, quantized
from .model_export import named_parameters


def build_empty_model(description: Mapping[str, Any]) -> nn.Module:
    """Return the described diffusion model on the CPU, its weights not initialised."""
    cls = _find_class(description, "comfy.", "model")
    # Not on the meta device: some classes compute buffers and tables in their constructor. ComfyUI's
    # layers leave their weights uninitialised, so no memory is touched before it is assigned.
    model = cls(**description["unet_config"], device="cpu", operations=_operations(description))
    return _filled(model, description)


def build_empty_encoder(description: Mapping[str, Any]) -> nn.Module:
    """Return the described transformer of a text encoder likewise."""
    cls = _find_class(description, "comfy.text_encoders.", "text encoder")
    config, dtype = dict(description["config"]), description["dtype"]
    return _filled(cls(config, dtype, torch.device("cpu"), _operations(description)), description)


def _find_class(description: Mapping[str, Any], package: str, what: str) -> Any:
    module_path, _, class_name = description["class_path"].rpartition(".")
    if not module_path.startswith(package):
        raise ValueError(f"{description['class_path']} is no {what} of ComfyUI")
    return getattr(importlib.import_module(module_path), class_name)


def _operations(description: Mapping[str, Any]) -> Any:
    if "quantized" in description:
        return quantized.make_operations(description["quantized"])
    return getattr(comfy.ops, description["operations"])


def _filled(model: nn.Module, description: Mapping[str, Any]) -> nn.Module:
    if "quantized" in description:
        quantized.fill_layers(model, description["quantized"])
    return model.eval().requires_grad_(False)


def whole_weights(
    module: nn.Module, description: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> Mapping[str, torch.Tensor]:
    """Return the parameters and buffers of the model that was built, made of the arena's tensors."""
    weights = tensors
    if "quantized" in description:
        weights = quantized.restore_layers(module, description["quantized"], tensors)
    weights = packed_weights.join(description.get("packed", {}), weights)
    expected = named_parameters(module)
    others = sorted(expected.keys() ^ weights.keys())
    if others:
        raise ValueError(f"the model was built with other tensors: {others}")
    for name, tensor in weights.items():
        if expected[name].shape != tensor.shape:
            shapes = f"{tuple(expected[name].shape)}, received {tuple(tensor.shape)}"
            raise ValueError(f"{name} was built {shapes}")
    return weights
