"""Sample a latent with ComfyUI's own KSampler code on a parallel MODEL."""

from __future__ import annotations

from typing import Any

import comfy.samplers
import torch

from ..errors import RequestError
from .parallel_model import make_parallel


def sampler_names() -> list[str]:
    """Return ComfyUI's sampler names."""
    return list(comfy.samplers.KSampler.SAMPLERS)


def scheduler_names() -> list[str]:
    """Return ComfyUI's scheduler names."""
    return list(comfy.samplers.KSampler.SCHEDULERS)


def sample_parallel(
    model: Any,
    *,
    gpus: int,
    cfg_degree: int,
    ulysses_degree: int,
    seed: int,
    steps: int,
    cfg: float,
    sampler_name: str,
    scheduler: str,
    positive: list,
    negative: list,
    latent: dict[str, Any],
    denoise: float,
    ring_degree: int = 1,
    tensor_parallel_degree: int = 1,
    ray_address: str = "",
    acceleration: str = "auto",
    batch_degree: int = 1,
) -> dict[str, Any]:
    """Return the sampled LATENT; every argument means what it means in KSampler.

    Raises:
        RequestError: If the request or its inputs are not supported; no worker is started then.
    """
    check_latent(latent)
    check_conditioning(positive, name="positive")
    check_conditioning(negative, name="negative")
    parallel = make_parallel(
        model,
        gpus=gpus,
        cfg_degree=cfg_degree,
        ulysses_degree=ulysses_degree,
        ring_degree=ring_degree,
        tensor_parallel_degree=tensor_parallel_degree,
        ray_address=ray_address,
        acceleration=acceleration,
        batch_degree=batch_degree,
    )
    import nodes  # ComfyUI's; imported late, because it pulls in every core node

    return nodes.common_ksampler(  # pyright: ignore[reportAttributeAccessIssue] - not our own `nodes`
        parallel, seed, steps, cfg, sampler_name, scheduler, positive, negative, latent, denoise=denoise
    )[0]


def check_latent(latent: dict[str, Any]) -> None:
    """Refuse a LATENT with NaN or infinite values.

    Raises:
        RequestError: With how many there are.
    """
    samples = latent["samples"]
    if not isinstance(samples, torch.Tensor):
        return  # nested latents (audio with video) are checked by the model itself
    bad = int((~torch.isfinite(samples)).sum())
    if bad:
        raise RequestError(
            f"the latent {tuple(samples.shape)} has {bad} NaN or infinite values",
            limit="Every value must be a finite number",
            way_out="Check the node that made it (a VAE in half precision often does this)",
        )


def check_conditioning(conditioning: list, *, name: str) -> None:
    """Refuse an empty CONDITIONING.

    Raises:
        RequestError: Naming the input.
    """
    if not conditioning:
        raise RequestError(
            f"the conditioning {name!r} is empty",
            limit="Sampling needs at least one entry",
            way_out="Connect a text encode node (for an empty negative: ConditioningZeroOut)",
        )
