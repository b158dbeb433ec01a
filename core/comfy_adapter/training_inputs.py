"""LATENT and CONDITIONING inputs of the training node as plain samples, checked before anything runs.

Both forms that ComfyUI's own training node takes are understood: one batched LATENT, or a list of
them (a dataset, possibly of several sizes); one CONDITIONING, or a list of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import RequestError
from ..training import Range, Sample, check_numbers, pair_samples
from .caption_checks import check_caption, check_same_width, check_start_image


@dataclass(frozen=True)
class Caption:
    """One entry of a CONDITIONING, with the latent that it describes.

    Attributes:
        entry: ``[embedding, options]`` as ComfyUI's nodes pass it.
        latent: ``(1, C, ...)``, scaled for the model; some models condition on it (inpainting).
    """

    entry: list
    latent: Tensor


@dataclass(frozen=True)
class Guidance:
    """The guidance scale that a network with an embedded one is trained at.

    Attributes:
        value: The scale.
        replaces: Also where a caption brings its own (Flux Guidance).
    """

    value: float
    replaces: bool = False

    def __post_init__(self) -> None:
        check_numbers(self, {"value": Range(0, name="guidance")})


def read_samples(
    model: Any, latents: Sequence[dict], conditioning: Sequence[list], *, guidance: Guidance | None = None
) -> list[Sample]:
    """Return the training samples.

    Args:
        model: The MODEL (``ModelPatcher``); decides the latents' scale and number of channels.
        latents: LATENTs, each with ``samples`` ``(N, C, ...)``.
        conditioning: CONDITIONINGs, each a list of ``[embedding, options]``.
        guidance: See ``set_guidance``.

    Raises:
        RequestError: If something is missing, does not match, or could not be honoured.
    """
    rows = [row for latent in latents for row in _latent_rows(latent)]
    entries = [
        entry
        for index, entries in enumerate(conditioning)
        for entry in caption_entries(f"conditioning {index}", entries)
    ]
    for index, entry in enumerate(entries):
        check_caption(model, f"caption {index}", entry)
        check_start_image(model, f"caption {index}", entry)
    check_same_width(entries)
    captions = [set_guidance(_normal(list(entry)), guidance) for entry in entries]
    pairs = pair_samples(rows, captions)
    scaled = [scale_latent(model, sample.latent) for sample in pairs]
    return [
        Sample(latent, Caption(sample.condition, latent))
        for sample, latent in zip(pairs, scaled, strict=True)
    ]


def caption_entries(what: str, conditioning: Any) -> list[list]:
    """Return the captions of a CONDITIONING, once it is known to be one.

    Raises:
        RequestError: Naming ``what`` and what is in its place.
    """
    is_list = isinstance(conditioning, list | tuple)
    wrong = [
        f"entry {number} is {type(entry).__name__}"
        for number, entry in enumerate(conditioning if is_list else [])
        if not (isinstance(entry, list | tuple) and len(entry) == 2 and isinstance(entry[1], dict))
    ]
    if wrong or not is_list:
        raise RequestError(
            f"{what} is of type {type(conditioning).__name__} {wrong or ''}",
            limit="A CONDITIONING is a list of pairs, an embedding and a dictionary of options",
            way_out="Connect a text encode node",
        )
    return list(conditioning)


def _latent_rows(latent: Any) -> list[Tensor]:
    samples = latent.get("samples") if isinstance(latent, dict) else latent
    if (
        not isinstance(latent, dict)
        or not isinstance(samples, Tensor)
        or samples.is_nested
        or not samples.ndim
    ):
        raise RequestError(
            f"a latent of type {type(samples).__name__} was given",
            limit="A latent is one tensor; those with several streams (audio with video) cannot be trained",
            way_out="Connect a VAE Encode, and use a model with one latent stream",
        )
    if samples.is_complex() or samples.dtype == torch.bool:
        raise RequestError(
            f"a latent of {samples.dtype} was given",
            limit="A latent holds real numbers",
            way_out="Connect a VAE Encode",
        )
    if latent.get("noise_mask") is not None:
        raise RequestError(
            f"a latent of shape {tuple(samples.shape)} with a noise mask was given",
            limit="Training looks at the whole latent and would not honour the mask",
            way_out="Remove the mask (Set Latent Noise Mask) before training",
        )
    # A clone made outside inference mode is a normal tensor, whatever mode the latent came from.
    return list(samples.detach().to("cpu", torch.float32, copy=True).split(1)) if samples.numel() else []


def set_guidance(entry: list, guidance: Guidance | None) -> list:
    """Return ``[embedding, options]`` with the guidance scale; None changes nothing."""
    embedding, options = entry
    if guidance is None or ("guidance" in options and not guidance.replaces):
        return entry
    return [embedding, {**options, "guidance": guidance.value}]


def scale_latent(model: Any, latent: Tensor) -> Tensor:
    """Return the latent as the sampler would give it to the model, ``(1, C, ...)``.

    Raises:
        RequestError: If it is not one of this model's VAE.
    """
    latent_format = model.get_model_object("latent_format")
    if latent_format.latent_dimensions == 3 and latent.ndim == 4:
        latent = latent.unsqueeze(2)
    dimensions, channels = latent.ndim - 2, latent.shape[1]
    if (dimensions, channels) != (latent_format.latent_dimensions, latent_format.latent_channels):
        raise RequestError(
            f"a latent of shape {tuple(latent.shape)} was given for {type(model.model).__name__}",
            limit=f"This model takes {latent_format.latent_channels} channels and "
            f"{latent_format.latent_dimensions} more dimensions",
            way_out="Encode the pictures with the VAE that belongs to this model",
        )
    return model.model.process_latent_in(latent)


def plain_entry(entry: Any) -> list:
    """Return one entry of a CONDITIONING as tensors that may be used outside of inference mode."""
    return _normal(list(entry))


def _normal(value: Any) -> Any:
    """Return ``value`` with its inference tensors replaced by normal copies; containers are copied."""
    if isinstance(value, Tensor):
        return value.detach().clone() if value.is_inference() else value.detach()
    if isinstance(value, dict):
        return {key: _normal(item) for key, item in value.items()}
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return type(value)(_normal(item) for item in value)
    return value
