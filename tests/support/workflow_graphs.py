"""Graphs that load a model, encode a prompt, sample and save; how it samples depends on the mode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from .graph_builder import Output
from .workflow_models import ModelFile, WorkflowModel
from .workflow_sheet import Sheet

_SEED = 42
_NOISE_BOUNDARY = 2  # the experts take half of the steps each


class Mode(Enum):
    """How a sampling workflow runs its model."""

    LOW_VRAM = "low_vram"
    PARALLEL = "parallel"


@dataclass
class Parts:
    """What the columns of a graph hand on.

    Attributes:
        models: One MODEL, or the experts.
        audio_vae: Of models with sound.
        vision: The image encoder, if there is one.
        latent: What is denoised, once a recipe has made it.
    """

    models: list[Output]
    clip: Output
    vae: Output
    vision: Output | None = None
    audio_vae: Output | None = None
    positive: Output | None = None
    negative: Output | None = None
    latent: Output | None = None


def load(sheet: Sheet, model: WorkflowModel, mode: Mode | None) -> Parts:
    """Add the loaders; with ``Mode.LOW_VRAM`` the diffusion model's weights are streamed."""
    if model.is_checkpoint:
        parts = _load_checkpoint(sheet, model, mode)
    else:
        models: list[Output] = []
        for file in model.models:
            models.append(_load_diffusion_model(sheet, file, mode, models[0] if models else None))
        clip = _load_text_encoder(sheet, model)
        (vae,) = sheet.add("VAELoader", files=_files(model.vae), vae_name=_name(model.vae))
        parts = Parts(models, clip, vae)
    if model.vision is not None:
        (parts.vision,) = sheet.add("CLIPVisionLoader", files=(model.vision,), clip_name=model.vision.name)
    return parts


def _load_diffusion_model(sheet: Sheet, file: ModelFile, mode: Mode | None, first: Output | None) -> Output:
    if mode is not Mode.LOW_VRAM:
        return sheet.add("UNETLoader", files=(file,), unet_name=file.name, weight_dtype="default")[0]
    shared = {} if first is None else {"share_with": first}
    return sheet.add("FerryLoadDiffusionModelOffload", files=(file,), unet_name=file.name, **shared)[0]


def _load_checkpoint(sheet: Sheet, model: WorkflowModel, mode: Mode | None) -> Parts:
    (file,) = model.models
    loaded, clip, vae = sheet.add("CheckpointLoaderSimple", files=(file,), ckpt_name=file.name)
    if mode is Mode.LOW_VRAM:
        (loaded,) = sheet.add("FerryOffloadModel", model=loaded)
    parts = Parts([loaded], clip, vae)
    if model.noise == "ltx2":
        (parts.clip,) = sheet.add(
            "LTXAVTextEncoderLoader",
            files=model.text_encoders,
            text_encoder=model.text_encoders[0].name,
            ckpt_name=file.name,
        )
        (parts.audio_vae,) = sheet.add("LTXVAudioVAELoader", ckpt_name=file.name)
    elif model.text_encoders:
        parts.clip = _load_text_encoder(sheet, model)
    return parts


def _load_text_encoder(sheet: Sheet, model: WorkflowModel) -> Output:
    files = model.text_encoders
    if len(files) == 1:
        return sheet.add("CLIPLoader", files=files, clip_name=files[0].name, type=model.clip_type)[0]
    names = {f"clip_name{number}": file.name for number, file in enumerate(files, start=1)}
    return sheet.add("DualCLIPLoader", files=files, type=model.clip_type, **names)[0]


def _files(file: ModelFile | None) -> tuple[ModelFile, ...]:
    return () if file is None else (file,)


def _name(file: ModelFile | None) -> str:
    return "" if file is None else file.name


def shift_and_norm(sheet: Sheet, model: WorkflowModel, parts: Parts) -> None:
    """Add what a model needs before its sampler."""
    for index, loaded in enumerate(parts.models):
        if model.shift is not None:
            kind, value = model.shift
            (loaded,) = sheet.add(kind, model=loaded, shift=value)
        if model.cfg_norm:
            (loaded,) = sheet.add("CFGNorm", model=loaded, strength=1.0)
        parts.models[index] = loaded


def degrees(model: WorkflowModel) -> dict[str, int]:
    """Return the degrees for two GPUs: the two prompts where there are two, else one sequence."""
    with_cfg = model.negative is not None and model.cfg > 1
    return {"gpus": 2, "cfg_degree": 2 if with_cfg else 1, "ulysses_degree": 1 if with_cfg else 2}


def _settings(model: WorkflowModel) -> dict[str, Any]:
    return {
        "steps": model.steps, "cfg": model.cfg, "sampler_name": model.sampler, "scheduler": model.scheduler
    }  # fmt: skip


def _parallel(sheet: Sheet, model: WorkflowModel, loaded: Output, mode: Mode) -> Output:
    if mode is not Mode.PARALLEL:
        return loaded
    return sheet.add("FerryParallelModel", model=loaded, **degrees(model))[0]


def _ksampler(sheet: Sheet, model: WorkflowModel, parts: Parts, mode: Mode) -> Output:
    kind, more = ("KSampler", {}) if mode is Mode.LOW_VRAM else ("FerryParallelSampler", degrees(model))
    return sheet.add(
        kind,
        model=parts.models[0],
        seed=_SEED,
        positive=parts.positive,
        negative=parts.negative,
        latent_image=parts.latent,
        denoise=1.0,
        **_settings(model),
        **more,
    )[0]


def _experts(sheet: Sheet, model: WorkflowModel, parts: Parts, mode: Mode) -> Output:
    half, latent = model.steps // _NOISE_BOUNDARY, parts.latent
    models = [_parallel(sheet, model, loaded, mode) for loaded in parts.models]
    for index, loaded in enumerate(models):
        first = index == 0
        (latent,) = sheet.add(
            "KSamplerAdvanced",
            node_title="KSampler, high noise" if first else "KSampler, low noise",
            model=loaded,
            add_noise="enable" if first else "disable",
            noise_seed=_SEED,
            positive=parts.positive,
            negative=parts.negative,
            latent_image=latent,
            start_at_step=0 if first else half,
            end_at_step=half if first else 10000,
            return_with_leftover_noise="enable" if first else "disable",
            **_settings(model),
        )
    assert latent is not None
    return latent


def _custom(sheet: Sheet, model: WorkflowModel, parts: Parts, sigmas: Output, guider: Output) -> Output:
    (noise,) = sheet.add("RandomNoise", noise_seed=_SEED)
    (sampler,) = sheet.add("KSamplerSelect", sampler_name=model.sampler)
    return sheet.add(
        "SamplerCustomAdvanced",
        noise=noise,
        guider=guider,
        sampler=sampler,
        sigmas=sigmas,
        latent_image=parts.latent,
    )[0]


def _flux2(sheet: Sheet, model: WorkflowModel, parts: Parts, mode: Mode) -> Output:
    loaded = _parallel(sheet, model, parts.models[0], mode)
    (guider,) = sheet.add("BasicGuider", model=loaded, conditioning=parts.positive)
    (sigmas,) = sheet.add("Flux2Scheduler", steps=model.steps, width=model.width, height=model.height)
    return _custom(sheet, model, parts, sigmas, guider)


def _ltx(sheet: Sheet, model: WorkflowModel, parts: Parts, mode: Mode) -> Output:
    loaded = _parallel(sheet, model, parts.models[0], mode)
    (guider,) = sheet.add(
        "CFGGuider", model=loaded, positive=parts.positive, negative=parts.negative, cfg=model.cfg
    )
    (sigmas,) = sheet.add("LTXVScheduler", steps=model.steps, latent=parts.latent)
    return _custom(sheet, model, parts, sigmas, guider)


SAMPLERS: dict[str, Callable[[Sheet, WorkflowModel, Parts, Mode], Output]] = {
    "ksampler": _ksampler, "experts": _experts, "flux2": _flux2, "ltx": _ltx, "ltx2": _ltx
}  # fmt: skip


def save(sheet: Sheet, model: WorkflowModel, parts: Parts, samples: Output) -> None:
    """Decode and save pictures, a video, or a video with sound."""
    prefix, sound = f"ferry/{model.key}", None
    if parts.audio_vae is not None:
        samples, audio = sheet.add("LTXVSeparateAVLatent", av_latent=samples)
        (sound,) = sheet.add("LTXVAudioVAEDecode", samples=audio, audio_vae=parts.audio_vae)
    if model.recipe == "qwen_layers":
        # The first frame is the picture itself; each other one is a layer.
        (samples,) = sheet.add("LatentCut", samples=samples, dim="t", index=1, amount=16384)
        (samples,) = sheet.add("LatentCutToBatch", samples=samples, dim="t", slice_size=1)
    (images,) = sheet.add("VAEDecode", samples=samples, vae=parts.vae)
    if not model.length:
        sheet.add("SaveImage", images=images, filename_prefix=prefix)
        return
    more = {} if sound is None else {"audio": sound}
    (video,) = sheet.add("CreateVideo", images=images, fps=model.fps, **more)
    sheet.add("SaveVideo", video=video, filename_prefix=prefix, format="auto", codec="auto")
