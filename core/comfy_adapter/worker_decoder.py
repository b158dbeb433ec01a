"""A VAE's decoder inside a worker: built by ComfyUI's own detection, its weights in the shared arena."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import comfy.sd
import torch
import torch.distributed as dist
from torch import nn

from ..parallel import RankLayout, SpatialHandle, dotted_path, parallelize_decoder
from ..plans import find_autoencoder_plan
from ..workers import ProgressCounter
from .model_export import named_parameters


class WorkerDecoder:
    """One rank's copy of an autoencoder; only the decoding half goes to its GPU.

    Args:
        description: Message of ``parallel_vae.describe_autoencoder``.
        weights: Every parameter and buffer by name.
        device: Where this rank computes.
        layout: Not looked at: all ranks share the picture.
        progress: Where each weight that is there is marked, and that a call waits for the device.
    """

    def __init__(
        self,
        description: Mapping[str, Any],
        weights: Mapping[str, torch.Tensor],
        *,
        device: torch.device,
        layout: RankLayout,
        progress: ProgressCounter,
    ) -> None:
        self.device = device
        self.progress = progress
        self.layout = layout
        self.module = _build(description, weights)
        plan = find_autoencoder_plan(dotted_path(self.module), dotted_path(self.module.decoder))
        for name, tensor in weights.items():
            inside = any(name.startswith(f"{part}.") for part in (*plan.parts, "bn"))
            _assign(self.module, name, tensor.to(device) if inside else tensor)
            progress.mark()
        group = dist.group.WORLD
        assert group is not None
        self.handle: SpatialHandle = parallelize_decoder(self.module, plan, group=group)

    @property
    def held_bytes(self) -> None:
        """None: weights do not stream."""

    def close(self) -> None:
        """Do nothing: all goes with the object."""

    def call(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return this rank's strip of the picture, on the CPU; all ranks call it together.

        Args:
            arguments: ``latent`` in the VAE's dtype, whole; ``options`` of ``decode``; ``random_state`` of
                the generator that would draw its noise in one process.

        Returns:
            ``strip``, and the ``random_state`` afterwards if decoding draws noise, else None.
        """
        latent, options = arguments["latent"].to(self.device), arguments["options"]
        generator = self._generator(arguments["random_state"])
        with torch.inference_mode():
            strip = self.handle.decode(self.module.decode, latent, generator=generator, **options)
            with self.progress.waiting():
                strip = strip.cpu()
        return {"strip": strip, "random_state": None if generator is None else generator.get_state()}

    def _generator(self, state: torch.Tensor) -> torch.Generator | None:
        if not self.handle.plan.draws_noise:
            return None
        # The CPU's state is longer than any GPU's.
        on_cpu = state.numel() == torch.get_rng_state().numel()
        generator = torch.Generator("cpu" if on_cpu else self.device)
        generator.set_state(state)
        return generator


def _build(description: Mapping[str, Any], weights: Mapping[str, torch.Tensor]) -> Any:
    vae = comfy.sd.VAE(sd=dict(weights), dtype=description["dtype"], metadata=description["metadata"])
    module = vae.first_stage_model
    expected = {name: tensor.shape for name, tensor in named_parameters(module).items()}
    if dotted_path(module) != description["class_path"]:
        raise ValueError(f"a {dotted_path(module)} was built in place of {description['class_path']}")
    if expected != {name: tensor.shape for name, tensor in weights.items()}:
        raise ValueError("the VAE was built with other tensors than it has in ComfyUI's process")
    return module


def _assign(module: nn.Module, name: str, tensor: torch.Tensor) -> None:
    owner_path, _, attribute = name.rpartition(".")
    owner = module.get_submodule(owner_path)
    if attribute in owner._parameters:
        owner._parameters[attribute] = nn.Parameter(tensor, requires_grad=False)
    else:
        owner._buffers[attribute] = tensor
