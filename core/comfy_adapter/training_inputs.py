"""LATENT and CONDITIONING inputs of the training node as plain samples, checked before anything runs.

Both forms that ComfyUI's own training node takes are understood: one batched LATENT, or a list of
them (a dataset, possibly of several sizes); one CONDITIONING, or a list of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import comfy.model_base
import torch
from torch import Tensor

from ..errors import RequestError
from ..training import Range, Sample, check_numbers, pair_samples

# What a conditioning may carry that training could not honour.
_REFUSED = {
    "control": "a ControlNet",
    "gligen": "GLIGEN boxes",
    "hooks": "hooked weights (Create Hook LoRA)",
    "area": "an area",
    "mask": "a mask",
    "start_percent": "a start percentage",
    "end_percent": "an end percentage",
    "clip_start_percent": "a CLIP schedule",
}
# Channels of a latent, of the start picture's, and of the mask.
_WITH_START_PICTURE = 16 + 16 + 4
_NEUTRAL = {"start_percent": 0.0, "end_percent": 1.0}


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
    entries = [entry for index, entries in enumerate(conditioning) for entry in _entries(index, entries)]
    for index, entry in enumerate(entries):
        check_caption(f"caption {index}", entry)
        check_start_image(model, f"caption {index}", entry)
    _check_same_width(entries)
    captions = [set_guidance(_normal(list(entry)), guidance) for entry in entries]
    pairs = pair_samples(rows, captions)
    scaled = [scale_latent(model, sample.latent) for sample in pairs]
    return [
        Sample(latent, Caption(sample.condition, latent))
        for sample, latent in zip(pairs, scaled, strict=True)
    ]


def _entries(index: int, conditioning: Any) -> list[list]:
    """Return the captions of a CONDITIONING, once it is known to be one."""
    is_list = isinstance(conditioning, list | tuple)
    wrong = [
        f"entry {number} is {type(entry).__name__}"
        for number, entry in enumerate(conditioning if is_list else [])
        if not (isinstance(entry, list | tuple) and len(entry) == 2 and isinstance(entry[1], dict))
    ]
    if wrong or not is_list:
        raise RequestError(
            f"conditioning {index} is of type {type(conditioning).__name__} {wrong or ''}",
            limit="A CONDITIONING is a list of pairs, an embedding and a dictionary of options",
            way_out="Connect a text encode node to 'positive'",
        )
    return list(conditioning)


def _latent_rows(latent: Any) -> list[Tensor]:
    samples = latent.get("samples") if isinstance(latent, dict) else latent
    if not isinstance(latent, dict) or not isinstance(samples, Tensor) or samples.is_nested:
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


def check_caption(what: str, entry: Any) -> None:
    """Refuse a caption that carries what training could not honour.

    Raises:
        RequestError: Naming ``what`` and what it carries.
    """
    embedding, options = entry[0], entry[1]
    if isinstance(embedding, Tensor) and embedding.shape[0] != 1:
        raise RequestError(
            f"{what} holds a batch of {embedding.shape[0]} embeddings",
            limit="Each caption must be one embedding, so that it belongs to one latent",
            way_out="Give one conditioning per caption",
        )
    if isinstance(embedding, Tensor) and not bool(torch.isfinite(embedding).all()):
        raise RequestError(
            f"{what} has NaN or infinite values",
            limit="Every value of an embedding must be a finite number",
            way_out="Check the text encoder that made it",
        )
    refused = [
        f"{kind} ({key})"
        for key, kind in _REFUSED.items()
        if options.get(key) is not None and options[key] != _NEUTRAL.get(key)
    ]
    if refused:
        raise RequestError(
            f"{what} carries {', '.join(refused)}",
            limit="Training learns from whole latents at all noise levels without other models",
            way_out="Connect the conditioning from before that node",
        )


def _check_same_width(entries: Sequence[list]) -> None:
    """Refuse captions of several text encoders; whether it is the model's, the first one's forward tells."""
    channels = [entry[0].shape[-1] for entry in entries if isinstance(entry[0], Tensor)]
    others = [index for index, width in enumerate(channels) if width != channels[0]]
    if others:
        raise RequestError(
            f"caption 0 has {channels[0]} channels and caption {others[0]} has {channels[others[0]]}",
            limit="A model takes embeddings of one width",
            way_out="Encode all captions with the text encoder that belongs to this model",
        )


def check_start_image(model: Any, what: str, entry: list) -> None:
    """Refuse to train a picture-to-video model (Wan) without the picture: it would unlearn to use it.

    Raises:
        RequestError: Naming ``what``.
    """
    options = entry[1]
    if _makes_video_of_picture(model) and options.get("concat_latent_image") is None:
        raise RequestError(
            f"{what} has no start picture, and this model makes videos of one",
            limit="ComfyUI would put an empty picture in its place at every step",
            way_out="Set start_image of Cache Training Data to 'first frame', or send the captions through "
            "WanImageToVideo",
        )
    sees = getattr(model.model.diffusion_model, "img_emb", None) is not None
    if sees and options.get("clip_vision_output") is None:
        raise RequestError(
            f"{what} has no CLIP vision output, and this model looks at its start picture through one",
            limit="Training would go on without what sampling has (Wan 2.1 I2V; Wan 2.2 needs none)",
            way_out="Send latents and captions through CLIP Vision Encode and WanImageToVideo",
        )


def _makes_video_of_picture(model: Any) -> bool:
    """Return whether a Wan network takes a start picture and its mask beside the latent.

    ``image_to_video`` of the model does not tell: ComfyUI sets it for TI2V-5B, and not for Wan 2.2 I2V.
    """
    config = getattr(model.model.model_config, "unet_config", {})
    return isinstance(model.model, comfy.model_base.WAN21) and config.get("in_dim") == _WITH_START_PICTURE


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
