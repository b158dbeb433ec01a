"""What a caption has to be before a model is trained on it: what can be told without running the model."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import comfy.model_base
import torch
from torch import Tensor

from ..errors import FerryError, RequestError

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
# Values of these that mean nothing.
_NEUTRAL = {"start_percent": 0.0, "end_percent": 1.0}

# Models whose references are no latents of their own kind.
_OTHER_REFERENCES = ("TripoSplat", "HiDreamO1")
# What PyTorch and ComfyUI raise on shapes and kinds that do not go together, and what is no such thing.
_MISFITS = (RuntimeError, ValueError, TypeError, AttributeError, LookupError)
_NO_MISFITS = (FerryError, torch.OutOfMemoryError, getattr(torch, "AcceleratorError", FerryError))
ENCODE_TEXT = "Encode the captions with the text encoder that belongs to this model"


def check_caption(model: Any, what: str, entry: Any) -> None:
    """Refuse a caption that is none, or that carries what training could not honour.

    Args:
        model: The MODEL; decides what a reference latent has to be.
        what: Names the caption.
        entry: ``[embedding, options]``.

    Raises:
        RequestError: Naming ``what`` and what is wrong with it.
    """
    embedding, options = entry[0], entry[1]
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
    _check_embedding(what, embedding)
    _check_pooled(what, options.get("pooled_output"))
    _check_guidance(what, options.get("guidance"))
    _check_references(model, what, options.get("reference_latents"))
    for name, tensor in _tensors(options):
        _check_finite(f"{what} has in {name}", tensor)


def _check_embedding(what: str, embedding: Any) -> None:
    is_embedding = isinstance(embedding, Tensor) and embedding.is_floating_point()
    if not is_embedding or embedding.ndim < 3 or not embedding[:1].numel() * len(embedding):
        raise RequestError(
            f"{what} has {_described(embedding)} for an embedding",
            limit="An embedding is a tensor of real numbers (1, tokens, channels) with a token at least",
            way_out=ENCODE_TEXT,
        )
    if embedding.shape[0] != 1:
        raise RequestError(
            f"{what} holds a batch of {embedding.shape[0]} embeddings",
            limit="Each caption must be one embedding, so that it belongs to one latent",
            way_out="Give one conditioning per caption",
        )
    _check_finite(f"{what} has", embedding)


def _check_pooled(what: str, pooled: Any) -> None:
    if pooled is None:  # some models take that for zeros, as they do when they sample
        return
    if not isinstance(pooled, Tensor) or pooled.ndim < 2 or pooled.shape[0] != 1:
        raise RequestError(
            f"{what} has {_described(pooled)} for a pooled_output",
            limit="A pooled embedding is one tensor (1, channels)",
            way_out=ENCODE_TEXT,
        )


def _check_guidance(what: str, guidance: Any) -> None:
    number = isinstance(guidance, int | float) and math.isfinite(guidance)
    if not (guidance is None or number or isinstance(guidance, Tensor)):
        raise RequestError(
            f"{what} has guidance={guidance!r}",
            limit="A guidance scale is a finite number",
            way_out="Set it by Flux Guidance, or by the training node's guidance",
        )


def _check_references(model: Any, what: str, references: Any) -> None:
    if references is None or type(model.model).__name__ in _OTHER_REFERENCES:
        return
    latent_format = model.get_model_object("latent_format")
    channels, dimensions = latent_format.latent_channels, latent_format.latent_dimensions
    wrong = [
        _described(latent)
        for latent in (references if isinstance(references, list | tuple) else [references])
        if not isinstance(latent, Tensor)
        or latent.ndim != 2 + dimensions
        or latent.shape[:2] != (1, channels)
        or not latent.numel()
    ]
    if wrong or not isinstance(references, list | tuple):
        raise RequestError(
            f"{what} has for reference_latents {', '.join(wrong) or _described(references)}",
            limit=f"{type(model.model).__name__} takes a list of single latents of {channels} channels and "
            f"{dimensions} more dimensions",
            way_out="Encode the pictures, each alone, with the VAE that belongs to this model",
        )


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
    return f"a value of type {type(value).__name__}"


def _tensors(options: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    for name, value in options.items():
        for item in value if isinstance(value, list | tuple) else [value]:
            if isinstance(item, Tensor):
                yield name, item


def _check_finite(what: str, tensor: Tensor) -> None:
    if tensor.is_floating_point() and not bool(torch.isfinite(tensor.float()).all()):
        raise RequestError(
            f"{what} NaN or infinite values",
            limit="Every value must be a finite number",
            way_out="Check the text encoder or VAE that made it",
        )


def check_same_width(entries: Sequence[list]) -> None:
    """Refuse captions of several text encoders; whether it is the model's, the first one's forward tells.

    Raises:
        RequestError: Naming the two captions.
    """
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


def check_are_read(conds: Mapping[str, Any], without: Mapping[str, Any], model: Any) -> None:
    """Refuse reference latents that a model does not look at: it would not learn what they are for.

    Args:
        conds: What the model makes of a caption.
        without: What it makes of the same without its reference latents.
        model: The model, of a ``model_base`` class.

    Raises:
        RequestError: If both are the same.
    """
    same = conds.keys() == without.keys()
    if same and all(_same(cond.cond, without[name].cond) for name, cond in conds.items()):
        raise RequestError(
            "a caption with reference latents (control pictures) was given",
            limit=f"{type(model).__name__} does not look at them",
            way_out="Use an edit model, or leave out control_folder and Reference Latent",
        )


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return torch.equal(first, second)
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        return len(first) == len(second) and all(map(_same, first, second))
    return type(first) is type(second) and bool(first == second)


@contextlib.contextmanager
def refuse_misfits(asked: str, model: Any) -> Iterator[None]:
    """Refuse what a model cannot compute, in place of the error that it meets somewhere inside.

    Args:
        asked: What it was given.
        model: The model, of a ``model_base`` class.

    Raises:
        RequestError: With that error's text. Running out of memory is passed on.
    """
    name = type(model).__name__
    try:
        yield
    except _MISFITS as error:
        if isinstance(error, _NO_MISFITS):
            raise
        text = (str(error) or type(error).__name__).splitlines()[0]
        raise RequestError(
            asked,
            limit=f"{name} cannot compute it ({type(error).__name__}: {text})",
            way_out="Encode pictures and captions with the VAE and the text encoder of this model",
        ) from error
