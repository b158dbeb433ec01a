"""Turn a VAE into one that decodes on several GPUs, each a strip of the picture, without seams.

The result is an ordinary VAE: any node may decode with it, and encoding stays in ComfyUI's process. What
ComfyUI does around the decoder (batches, scaling to pixels) is its own code, run on a copy of the VAE whose
decoder is the workers'.
"""

from __future__ import annotations

import copy
import json
from typing import Any

import comfy.sd
import torch

from ..errors import RequestError
from ..parallel import ParallelDims, cut_dim, dotted_path, planned_modules
from ..plans import find_autoencoder_plan
from .devices import check_gpus, worker_devices
from .model_export import named_parameters
from .part_loader import PartLoader
from .worker_groups import acquire_group, model_token
from .worker_parts import WorkerPart


def make_parallel_vae(vae: Any, *, gpus: int) -> Any:
    """Return a VAE that decodes on ``gpus`` worker processes; starts none yet.

    Args:
        vae: A ``comfy.sd.VAE``.
        gpus: Number of GPUs, one process each.

    Raises:
        RequestError: If the VAE or the number of GPUs is not supported.
    """
    check_gpus(gpus)
    devices = worker_devices(gpus)
    if isinstance(vae, ParallelVAE):
        raise RequestError(
            "a VAE that is parallel already was given",
            limit="One VAE has one number of GPUs",
            way_out="Keep one Parallel VAE in the chain",
        )
    vae.throw_exception_if_invalid()
    module = vae.first_stage_model
    plan = find_autoencoder_plan(dotted_path(module), dotted_path(getattr(module, "decoder", module)))
    planned_modules(module, plan)
    _metadata(module)
    if vae.patcher.patches or vae.patcher.object_patches:
        raise RequestError(
            "a VAE with patched weights was given",
            limit="Workers hold a VAE as it was loaded",
            way_out="Remove the node that patches it, or decode on one GPU",
        )
    parallel = copy.copy(vae)
    parallel.__class__ = ParallelVAE
    parallel.ferry_devices = devices
    return parallel


class ParallelVAE(comfy.sd.VAE):
    """A VAE whose ``decode`` and ``decode_tiled`` run in the workers."""

    ferry_devices: tuple[str, ...]

    def decode(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return ``[B, (frames,) H, W, C]`` of a latent, as ``comfy.sd.VAE.decode`` does."""
        return self._on_workers().decode(*args, **kwargs)

    def decode_tiled(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the same, tile by tile, each tile decoded by all GPUs."""
        return self._on_workers().decode_tiled(*args, **kwargs)

    def _on_workers(self) -> comfy.sd.VAE:
        remote = copy.copy(self)
        remote.__class__ = comfy.sd.VAE
        part = _decoder_part(self)
        # Both stand for the VAE's own in what `decode` does with them.
        standing: dict[str, Any] = {
            "patcher": PartLoader(part, self.ferry_devices, self.patcher),
            "first_stage_model": RemoteDecoder(part, self.ferry_devices),
        }
        remote.__dict__.update(standing)
        return remote


class RemoteDecoder:
    """Stands for a VAE's ``first_stage_model``; only ``decode`` is ever called."""

    def __init__(self, part: WorkerPart, devices: tuple[str, ...]) -> None:
        self.part = part
        self.devices = devices

    def decode(self, latent: torch.Tensor, **options: Any) -> torch.Tensor:
        """Return the picture of a latent, both in the VAE's dtype.

        Noise is what this process would draw on the latent's device, and this process' generator is left
        as it would leave it.
        """
        arguments = {"latent": latent.cpu(), "options": options, "random_state": _random_state(latent.device)}
        results = acquire_group(self.devices).call(model_token(self.part.owner), arguments)
        if results[0]["random_state"] is not None:
            _set_random_state(latent.device, results[0]["random_state"])
        strips = [result["strip"] for result in results]
        return torch.cat([strip for strip in strips if strip.numel()], dim=cut_dim(latent))


def _random_state(device: torch.device) -> torch.Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _set_random_state(device: torch.device, state: torch.Tensor) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


def _decoder_part(vae: Any) -> WorkerPart:
    module = vae.first_stage_model
    dtype = vae.vae_dtype
    description = {"class_path": dotted_path(module), "dtype": dtype, "metadata": _metadata(module)}
    return WorkerPart(
        owner=module,
        module=module,
        kind="decoder",
        dims=ParallelDims(ulysses=len(vae.ferry_devices)),
        describe=lambda: description,
        num_bytes=sum(tensor.nbytes for tensor in named_parameters(module).values()),
    )


def _metadata(module: Any) -> dict[str, str]:
    """Return what ComfyUI builds a VAE of besides weights: Lightricks' files describe theirs in metadata."""
    if not dotted_path(module).startswith("comfy.ldm.lightricks."):
        return {}
    config = getattr(module, "config", None)
    if config is None:
        raise RequestError(
            "parallel decoding with a Lightricks VAE was asked",
            limit="This ComfyUI does not keep how the file describes it, so workers could not build it",
            way_out="Update ComfyUI (0.33 keeps it), or decode on one GPU",
        )
    return {"config": json.dumps({"vae": config})}
