"""The diffusion model inside a worker: built empty, filled from the shared arena, patched, called."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import comfy.float
import comfy.lora
import comfy.model_management
import comfy.ops
import comfy.utils
import torch
from torch import nn

from ..parallel import ParallelHandle, SequenceGroup, parallelize
from ..plans import find_plan
from .model_export import innermost_forward, named_tensors
from .patch_messages import PREFIX, decode_patches


class WorkerModel:
    """One rank's copy of a diffusion model.

    Args:
        description: The message of ``model_export.describe_model``.
        weights: Every parameter and buffer by name. On a CPU worker the model uses this memory itself
            (shared by all ranks); on a GPU it is copied to ``device``.
        device: Where this rank computes.
        group: The ranks that share one sequence, or None for a single rank.
    """

    def __init__(
        self,
        description: Mapping[str, Any],
        weights: Mapping[str, torch.Tensor],
        *,
        device: torch.device,
        group: SequenceGroup | None,
    ) -> None:
        self.device = device
        self.weights = weights
        self.module = _build(description)
        _assign(self.module, weights, device)
        self.patched: set[str] = set()
        self.casting = {
            layer: bool(layer.comfy_cast_weights)
            for layer in self.module.modules()
            if hasattr(layer, "comfy_cast_weights")
        }
        self.handle: ParallelHandle | None = None
        if group is not None:
            self.handle = parallelize(self.module, find_plan(description["class_path"]), group=group)

    def apply_patches(self, message: Mapping[str, Any]) -> list[str]:
        """Make the weights those of the arena with ``message``'s patches, and no others.

        The arithmetic is ComfyUI's own (``ModelPatcher.patch_weight_to_device``): compute dtype,
        ``calculate_weight``, then stochastic rounding seeded by the key.

        Returns:
            The patched parameter names, sorted, so that the caller can compare ranks.
        """
        patches = decode_patches(message)
        for name in self.patched - patches.keys():
            comfy.utils.set_attr_param(self.module, name, self.weights[name].to(self.device))
        for name, entries in patches.items():
            comfy.utils.set_attr_param(self.module, name, self._patched_weight(name, entries))
        self.patched = set(patches)
        return sorted(self.patched)

    def set_force_cast(self, force: bool) -> None:
        """Cast weights to the input's dtype in every layer (ComfyUI's ModelComputeDtype), or as built."""
        for layer, built in self.casting.items():
            setattr(layer, "comfy_cast_weights", force or built)  # noqa: B010 - an attribute of ComfyUI's layers

    def forward(self, arguments: Mapping[str, Any]) -> Any:
        """Run the model's innermost forward; all ranks of the group must call it together.

        Args:
            arguments: Its keyword arguments, tensors on any device.

        Returns:
            What it returns, on the CPU.
        """
        moved = _map_tensors(dict(arguments), lambda tensor: tensor.to(self.device))
        own_forward: Any = getattr(self.module, innermost_forward(self.module))
        with torch.inference_mode():
            if self.handle is None:
                output = own_forward(**moved)
            else:
                options = moved["transformer_options"]
                options["optimized_attention_override"] = self.handle.attention_override
                output = self.handle.run(own_forward, **moved)
            return _map_tensors(output, lambda tensor: tensor.cpu())

    def _patched_weight(self, name: str, entries: list[tuple]) -> torch.Tensor:
        key = PREFIX + name
        weight = self.weights[name]
        compute = comfy.model_management.cast_to_device(
            weight, self.device, _lora_dtype(self.device), copy=True
        )
        patched = comfy.lora.calculate_weight(entries, compute, key)
        seed = _string_to_seed(key)
        return comfy.float.stochastic_rounding(patched, weight.dtype, seed=seed)


def _build(description: Mapping[str, Any]) -> nn.Module:
    module_path, _, class_name = description["class_path"].rpartition(".")
    if not module_path.startswith("comfy."):
        raise ValueError(f"{description['class_path']} is no model of ComfyUI")
    cls = getattr(importlib.import_module(module_path), class_name)
    operations = getattr(comfy.ops, description["operations"])
    # Not on the meta device: some classes compute buffers and tables in their constructor. ComfyUI's
    # layers leave their weights uninitialised, so no memory is touched before it is assigned.
    model = cls(**description["unet_config"], device="cpu", operations=operations)
    return model.eval().requires_grad_(False)


def _assign(module: nn.Module, weights: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """Point every parameter and buffer at its arena tensor, then move what is not on ``device``."""
    expected = named_tensors(module)
    if expected.keys() != weights.keys():
        raise ValueError(
            f"the model was built with other tensors: {sorted(expected.keys() ^ weights.keys())}"
        )
    for name, tensor in weights.items():
        if expected[name].shape != tensor.shape:
            raise ValueError(
                f"{name} was built {tuple(expected[name].shape)}, received {tuple(tensor.shape)}"
            )
        owner_path, _, attribute = name.rpartition(".")
        owner = module.get_submodule(owner_path)
        if attribute in owner._parameters:
            owner._parameters[attribute] = nn.Parameter(tensor, requires_grad=False)
        else:
            owner._buffers[attribute] = tensor
    module.to(device)


def _map_tensors(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: _map_tensors(item, function) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_map_tensors(item, function) for item in value)
    return value


def _lora_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype in which ComfyUI adds LoRA to weights; 0.3.75 always used fp32."""
    choose = getattr(comfy.model_management, "lora_compute_dtype", None)
    return torch.float32 if choose is None else choose(device)


def _string_to_seed(key: str) -> int:
    if hasattr(comfy.utils, "string_to_seed"):
        return comfy.utils.string_to_seed(key)
    from comfy.model_patcher import string_to_seed  # where 0.3.75 keeps it

    return string_to_seed(key)
