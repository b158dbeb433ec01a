"""The diffusion model inside a worker: built empty, filled from the shared arena, patched, called."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import comfy.float
import comfy.lora
import comfy.model_management
import comfy.utils
import torch
from torch import nn

from ..offload import PackedWeight, WeightChange
from ..parallel import (
    ModelPlan,
    ParallelHandle,
    RankLayout,
    install_parallel,
)
from ..plans import find_plan
from ..workers import ProgressCounter
from . import packed_weights, quantized
from .acceleration import Acceleration, check_streamed
from .empty_model import build_empty_model, whole_weights
from .model_export import named_parameters
from .patch_arithmetic import lora_dtype, rounding_seed
from .patch_messages import PREFIX, decode_patches
from .patched_blocks import PatchedBlocks
from .rank_weights import RankWeights, find_tensor_handle
from .sent_tensors import unpack
from .worker_forward import WorkerForward
from .worker_stream import WorkerStream


class WorkerModel:
    """One rank's copy of a diffusion model.

    Args:
        description: The message of ``model_export.describe_model``.
        weights: Every whole parameter and buffer by name. On a CPU worker the model uses this memory itself
            (shared by all ranks); on a GPU this rank's part of it is copied to ``device``.
        device: Where this rank computes.
        layout: Which ranks share its sequence and its weights.
        stream: ``room_bytes`` and ``prefetch_depth`` if the weights are to stream, else None.
        progress: Where each weight that is there or patched is marked, and that a call waits for the device.
    """

    def __init__(
        self,
        description: Mapping[str, Any],
        weights: Mapping[str, torch.Tensor],
        *,
        device: torch.device,
        layout: RankLayout,
        stream: Mapping[str, int] | None = None,
        progress: ProgressCounter | None = None,
    ) -> None:
        self.device = device
        self.progress = progress or ProgressCounter(None, device)
        self.layout = layout
        self.module = self._build(description)
        self.prefix: str = description.get("patch_prefix", PREFIX)
        self.weights = whole_weights(self.module, description, weights)
        plan = self._find_plan(description["class_path"])
        tensor = find_tensor_handle(self.module, plan, layout)
        shards = None if tensor is None else tensor.shards
        self.held = RankWeights(shards, device, streams=stream is not None)
        self._assign()
        self.patched: set[str] = set()
        self.kept: dict[int, torch.Tensor] = {}
        self.casting = {
            layer: bool(layer.comfy_cast_weights)
            for layer in self.module.modules()
            if hasattr(layer, "comfy_cast_weights")
        }
        self.handle: ParallelHandle | None = None
        if layout.sequence_group is not None or tensor is not None:
            self.handle = install_parallel(self.module, plan, group=layout.sequence_group, tensor=tensor)
        self.evaluate = WorkerForward(self.module, plan, self.handle, device=device)
        self.stream: WorkerStream | None = None
        self._changes = 0
        # Where the device's memory is the host's, which is to hold one copy.
        self._blocks = PatchedBlocks(self.module, plan) if device.type == "cpu" else None
        if stream is not None:
            self.stream = WorkerStream(self.module, device, weights.values(), parts=self.held.parts, **stream)

    @property
    def held_bytes(self) -> int | None:
        """GPU memory of streamed weights; None if they do not stream."""
        return None if self.stream is None else self.stream.held_bytes

    def close(self) -> None:
        """Let go of what does not go with the object."""
        self.evaluate.model_changed()
        if self.stream is not None:
            self.stream.close()

    def set_acceleration(self, acceleration: Acceleration) -> None:
        """Evaluate in this way; weights that stream are evaluated as they come.

        Raises:
            RequestError: If they stream, and something else was asked.
        """
        if self.stream is None:
            self.evaluate.set_acceleration(acceleration)
        else:
            check_streamed(acceleration)

    @staticmethod
    def _build(description: Mapping[str, Any]) -> nn.Module:
        return build_empty_model(description)

    @staticmethod
    def _find_plan(path: str) -> ModelPlan:
        return find_plan(path)

    def apply_patches(self, message: Mapping[str, Any]) -> list[str]:
        """Make the weights those of the arena with ``message``'s patches, and no others.

        The arithmetic is ComfyUI's own (``ModelPatcher.patch_weight_to_device``): compute dtype,
        ``calculate_weight``, then stochastic rounding seeded by the key.

        Returns:
            The patched parameter names, sorted, so that the caller can compare ranks.
        """
        self.evaluate.model_changed()
        patches = decode_patches(message)
        if self.stream is not None:
            self.stream.set_changes(self._streamed_changes(patches))
            self.patched = set(patches)
            return sorted(self.patched)

        def patched(name: str) -> torch.Tensor | None:
            # Patched whole, then cut: a rank has the very numbers of the whole, stochastic rounding too.
            # A packed one becomes dense: what a recording reads must not be made while it is replayed.
            whole = self._patched_weight(name, patches[name], self.weights[name])
            self.progress.mark()
            return self.held.own(name, whole)

        as_used = set() if self._blocks is None else self._blocks.patch(self.weights, patches, patched)
        for name in self.patched - patches.keys() | as_used:
            self._set(name, self.held.place(name, self.weights[name]))
        for name in patches.keys() - as_used:
            self._set(name, patched(name))
        self.patched = set(patches)
        return sorted(self.patched)

    def set_force_cast(self, force: bool) -> None:
        """Cast weights to the input's dtype in every layer (ComfyUI's ModelComputeDtype), or as built."""
        self.evaluate.model_changed()
        for layer, built in self.casting.items():
            setattr(layer, "comfy_cast_weights", force or built)  # noqa: B010 - an attribute of ComfyUI's layers

    def keep(self, fresh: Mapping[str, torch.Tensor], forget: list[int]) -> None:
        """Keep what later calls name by number (see ``sent_tensors``), and forget what none will."""
        for number in forget:
            del self.kept[number]
        self.kept |= {int(number): tensor.to(self.device, copy=True) for number, tensor in fresh.items()}

    def forward(self, arguments: Mapping[str, Any]) -> Any:
        """Run the model's innermost forward; all ranks of the group must call it together.

        Args:
            arguments: Its keyword arguments, tensors on any device; they are copied.

        Returns:
            What it returns, on the rank's device, which is done with it; valid until the next call.
        """
        moved = unpack(dict(arguments), self.kept, lambda tensor: tensor.to(self.device, copy=True))
        if self.stream is None:
            output = self.evaluate(moved)
        else:
            with torch.inference_mode():
                output = self.stream.run(self.evaluate.plainly, moved)
        if self.device.type == "cuda":
            with self.progress.waiting():
                torch.cuda.current_stream(self.device).synchronize()
        return output

    def _assign(self) -> None:
        """Point every parameter and buffer at this rank's part of its arena tensor, on the rank's device."""
        for name, whole in self.weights.items():
            owner_path, _, attribute = name.rpartition(".")
            owner = self.module.get_submodule(owner_path)
            part = self.held.place(name, whole)
            if attribute in owner._parameters:
                held = None if part is None else nn.Parameter(part, requires_grad=False)
                owner._parameters[attribute] = held
            else:
                owner._buffers[attribute] = part
            self.progress.mark()

    def _set(self, name: str, part: torch.Tensor | None) -> None:
        if part is not None:
            comfy.utils.set_attr_param(self.module, name, part)

    def _streamed_changes(self, patches: Mapping[str, list[tuple]]) -> dict[str, WeightChange]:
        """Return what is done to each patched weight of this rank when it has come to the device."""
        self._changes += 1
        held = named_parameters(self.module).keys()

        return {
            name: WeightChange((self._changes, name), functools.partial(self._patched_part, name, entries))
            for name, entries in patches.items()
            if name in held
        }

    def _patched_part(self, name: str, entries: list[tuple], held: torch.Tensor) -> torch.Tensor:
        """Return what this rank holds of a weight, with its patches; a packed one gets them in use."""
        if isinstance(held, PackedWeight):
            return held.changed(functools.partial(self._patched_part, name, entries))
        if self.held.find(name) is None:
            return self._patched_weight(name, entries, held)
        # Patched whole and then cut, see above.
        local = self.held.own(name, self._patched_weight(name, entries, self.weights[name]))
        assert local is not None
        return local

    def _patched_weight(self, name: str, entries: list[tuple], weight: torch.Tensor) -> torch.Tensor:
        """Return a whole weight, given as it is in the file on any device, with its patches."""
        key = self.prefix + name
        if isinstance(weight, PackedWeight):
            weight = packed_weights.dense_on(weight, self.device)
        compute = comfy.model_management.cast_to_device(
            weight, self.device, lora_dtype(self.device), copy=True
        )
        is_quantized = quantized.is_quantized(weight)
        if is_quantized:
            compute = compute.dequantize()
        patched = comfy.lora.calculate_weight(entries, compute, key)
        seed = rounding_seed(key)
        if is_quantized:
            return quantized.requantize(weight, patched, seed)
        owner_path, _, attribute = name.rpartition(".")
        if attribute == "weight" and quantized.is_mixed_linear(self.module.get_submodule(owner_path)):
            return patched.to(weight.dtype)  # what such a layer does with a weight that is not quantized
        return comfy.float.stochastic_rounding(patched, weight.dtype, seed=seed)
