"""Encode a training set once, to disk; afterwards neither text encoder nor VAE is needed.

Captions are encoded first, then the text encoder leaves the GPU, then the latents, then the VAE. Each
file is written as soon as it is made, so a run that was stopped goes on where it was.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import comfy.model_management
import comfy.utils
import folder_paths
import torch
from torch import Tensor

from ..errors import RequestError
from ..log import get_logger
from ..training.dataset import (
    CachedItem,
    CacheFolder,
    MediaItem,
    TrainingCache,
    TrainingSet,
    cache_key,
    content_digest,
    read_pixels,
)
from .control_prompts import AUTO_PROMPT, ControlPrompt, choose_prompt
from .encoder_identity import clip_identity, vae_identity

_LOG = get_logger("training")
_FOLDER = "training_cache"
NO_START, FIRST_FRAME = "none", "first frame"
START_IMAGES = (NO_START, FIRST_FRAME)


@dataclass(frozen=True)
class CacheResult:
    """A cache, and what was done for it.

    Attributes:
        cache: For the training.
        num_encoded: Files made now.
        num_found: Files that were there and intact.
    """

    cache: TrainingCache
    num_encoded: int
    num_found: int


@dataclass(frozen=True)
class _Job:
    """One file to be there afterwards."""

    key: str
    name: str
    encode: Callable[[], tuple[dict[str, Tensor], dict[str, Any]]]


def cache_training_set(
    training_set: TrainingSet,
    clip: Any,
    vae: Any,
    *,
    control_prompt: str = AUTO_PROMPT,
    start_image: str = NO_START,
) -> CacheResult:
    """Return the set with all latents and captions on disk, encoding what is not there yet.

    Args:
        training_set: Files, captions and buckets.
        clip: ComfyUI's CLIP.
        vae: ComfyUI's VAE.
        control_prompt: How a text encoder is shown control pictures, see ``control_prompts``.
        start_image: One of ``START_IMAGES``: what picture-to-video models start from.

    Raises:
        RequestError: If the VAE cannot take the pictures, a file changed, or a result is not finite.
        SaveError: If the disk does not take a file.
    """
    for name, encoder in (("clip", clip), ("vae", vae)):
        if encoder is None:
            raise RequestError(
                f"{name} is empty",
                limit="The checkpoint that it comes from holds none",
                way_out="Load text encoder and VAE from their own files",
            )
    controls = [item.control for item in training_set.items if item.control is not None]
    check_vae_takes([*training_set.items, *controls], vae)
    check_start(training_set.items, start_image)
    prompt = choose_prompt(clip, control_prompt, has_controls=bool(controls))
    files = CacheFolder(Path(folder_paths.get_output_directory()) / _FOLDER)
    captions = _caption_jobs(training_set, clip, prompt)
    latents = _latent_jobs([*training_set.items, *controls], vae)
    starts = _latent_jobs(training_set.items, vae, first_alone=True) if start_image == FIRST_FRAME else {}
    jobs = {job.key: job for job in (*captions.values(), *latents.values(), *starts.values())}
    missing = {key for key in jobs if not files.has(key)}
    num_missing = len(missing)
    bar = comfy.utils.ProgressBar(len(jobs))
    bar.update(len(jobs) - num_missing)
    try:
        for group in (list(captions.values()), [*latents.values(), *starts.values()]):
            for job in group:
                if job.key not in missing:
                    continue
                comfy.model_management.throw_exception_if_processing_interrupted()
                files.write(job.key, *job.encode())
                missing.discard(job.key)
                bar.update(1)
            # The text encoder leaves before the VAE comes.
            comfy.model_management.unload_all_models()
    finally:
        comfy.model_management.unload_all_models()
        comfy.model_management.soft_empty_cache()
    items = tuple(
        CachedItem(
            name=item.name,
            latent_key=latents[item].key,
            caption_key=captions[item.caption, _shown(item, prompt)].key,
            empty_caption_key=captions["", _shown(item, prompt)].key if item.caption_dropout else None,
            control_key=None if item.control is None else latents[item.control].key,
            start_key=starts[item].key if starts else None,
            shape=files.shape(latents[item].key, "latent"),
            repeats=item.repeats,
            caption_dropout=item.caption_dropout,
        )
        for item in training_set.items
    )
    _LOG.info(
        "training cache in %s: %d files made, %d found", files.folder, num_missing, len(jobs) - num_missing
    )
    return CacheResult(TrainingCache(files, items), num_missing, len(jobs) - num_missing)


def check_vae_takes(items: Sequence[MediaItem], vae: Any) -> None:
    """Refuse buckets and videos that the VAE would crop or cannot take.

    Raises:
        RequestError: Naming a file and what would fit.
    """
    step = int(vae.spacial_compression_encode())
    for item in items:
        if item.bucket.width_px % step or item.bucket.height_px % step:
            raise RequestError(
                f"{item.name} is brought to {item.bucket}",
                limit=f"This VAE makes one latent of {step} x {step} pixels and would crop it",
                way_out=f"Load the folder with sides in multiples of {step} (model_family)",
            )
        if item.num_frames > 1:
            _check_frames(item, vae)


def check_start(items: Sequence[MediaItem], start_image: str) -> None:
    """Refuse a start that is unknown, or that leaves nothing to learn.

    Raises:
        RequestError: Naming a picture.
    """
    if start_image not in START_IMAGES:
        raise RequestError(
            f"start_image={start_image!r} was asked",
            limit=f"Known are {list(START_IMAGES)}",
            way_out="Choose one of them",
        )
    picture = next((item.name for item in items if item.num_frames == 1), None)
    if start_image == FIRST_FRAME and picture is not None:
        raise RequestError(
            f"start_image={start_image!r} was asked with {picture}",
            limit="A single picture is its own first frame, so nothing is left to learn",
            way_out="Load videos alone, with video_frames above 1, or set start_image to none",
        )


def _check_frames(item: MediaItem, vae: Any) -> None:
    if vae.latent_dim != 3 or getattr(vae, "not_video", False):
        raise RequestError(
            f"{item.name} is a video of {item.num_frames} frames",
            limit="This VAE encodes single pictures only",
            way_out="Use the VAE of a video model, or set video_frames to 1",
        )
    fitting = vae.upscale_ratio[0](vae.downscale_ratio[0](item.num_frames))
    if fitting != item.num_frames:
        raise RequestError(
            f"{item.name} was loaded with video_frames={item.num_frames}",
            limit="This VAE packs frames in groups and would leave some out",
            way_out=f"Set video_frames to {fitting}",
        )


def _shown(item: MediaItem, prompt: ControlPrompt | None) -> MediaItem | None:
    """Return the control picture that the text encoder sees with an item's caption."""
    return None if prompt is None else item.control


def _caption_jobs(
    training_set: TrainingSet, clip: Any, prompt: ControlPrompt | None
) -> dict[tuple[str, MediaItem | None], _Job]:
    """Return one job for each different caption, by caption and the control picture seen with it."""
    wanted = {(item.caption, _shown(item, prompt)): item.name for item in training_set.items}
    for item in training_set.items:
        if item.caption_dropout:
            wanted.setdefault(("", _shown(item, prompt)), "the empty caption")
    identity = clip_identity(clip)
    jobs = {}
    for (caption, control), name in wanted.items():
        # The tokens hold all that the tokenizer adds: templates, weights, embeddings, its options.
        tokens = clip.tokenize(caption)
        parts = [content_digest(tokens)]
        if control is not None and prompt is not None:
            bucket = [control.bucket.width_px, control.bucket.height_px]
            parts += [caption, prompt.name, control.digest, bucket, control.mirrored]
        key = cache_key("caption", identity, *parts)
        if control is None or prompt is None:
            encode = functools.partial(clip.encode_from_tokens_scheduled, tokens, show_pbar=False)
        else:
            encode = functools.partial(_encode_with_control, clip, prompt, caption, control)
        jobs[caption, control] = _Job(key, name, functools.partial(_encode_caption, encode, name))
    return jobs


def _encode_with_control(clip: Any, prompt: ControlPrompt, caption: str, control: MediaItem) -> list:
    return prompt.encode(clip, caption, read_pixels(control))


def _encode_caption(encode: Callable[[], list], name: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    entries = encode()
    if len(entries) != 1:
        raise RequestError(
            f"the caption of {name} gives {len(entries)} conditionings",
            limit="Each sample is trained with one",
            way_out="Connect the CLIP without a schedule",
        )
    cond, options = entries[0]
    tensors, values = {"cond": cond}, {}
    for key, value in options.items():
        if isinstance(value, Tensor) and key != "cond":
            tensors[key] = value
        elif value is None or isinstance(value, bool | int | float | str):
            values[key] = value
        else:
            raise RequestError(
                f"the text encoder gives {key!r}, a {type(value).__name__}",
                limit="A cache file holds tensors and plain values",
                way_out="Encode the captions with a text encode node and train on latents and conditioning",
            )
    _check_finite(f"the caption of {name}", tensors)
    return tensors, values


def _latent_jobs(items: Sequence[MediaItem], vae: Any, *, first_alone: bool = False) -> dict[MediaItem, _Job]:
    """Return one job for each different picture, by item; ``first_alone`` for its first frame, then grey."""
    kind = "start latent" if first_alone else "latent"
    identity = vae_identity(vae)
    jobs = {}
    for item in items:
        frames = [item.num_frames, item.rate_hz] if item.is_video else []
        bucket = [item.bucket.width_px, item.bucket.height_px]
        key = cache_key(kind, identity, item.digest, bucket, item.mirrored, frames)
        encode = functools.partial(_encode_pixels, vae, item, key, first_alone=first_alone)
        jobs[item] = _Job(key, item.name, encode)
    return jobs


def _encode_pixels(
    vae: Any, item: MediaItem, key: str, *, first_alone: bool
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    pixels = read_pixels(item)
    if first_alone:  # as ComfyUI's WanImageToVideo
        pixels[1:] = 0.5
    devices = [] if vae.device.type == "cpu" else [vae.device]
    with torch.random.fork_rng(devices, device_type=vae.device.type if devices else "cuda"):
        # Some VAEs draw from the latent's distribution: by the content, not by what ran before.
        torch.manual_seed(int(key[:15], 16))
        latent = vae.encode(pixels)
    if latent.shape[0] != 1:
        raise RequestError(
            f"{item.name} became {latent.shape[0]} latents of shape {tuple(latent.shape[1:])}",
            limit="Each file is one sample",
            way_out="Use the VAE that belongs to the model",
        )
    _check_finite(item.name, {"latent": latent})
    return {"latent": latent}, {}


def _check_finite(what: str, tensors: dict[str, Tensor]) -> None:
    bad = [name for name, tensor in tensors.items() if not bool(torch.isfinite(tensor.float()).all())]
    if bad:
        raise RequestError(
            f"{what} was encoded to NaN or infinite values ({', '.join(bad)})",
            limit="Every value must be a finite number",
            way_out="Load the VAE or text encoder in a wider dtype (--fp32-vae, --fp32-text-enc)",
        )
