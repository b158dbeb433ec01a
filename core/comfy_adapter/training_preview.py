"""Pictures of what the LoRA has learned so far, sampled on the very model that is being trained.

The weights keep streaming as they do in a step, the sampler and its noise levels are ComfyUI's, and
nothing of the training is touched: its random numbers are functions of the step, and averaged weights
are put in for the picture and taken out again.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import comfy.k_diffusion.sampling
import comfy.model_management
import comfy.samplers
import folder_paths
import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ..errors import RequestError
from ..training import NoiseLevels, SampleSource, Training
from .caption_checks import ENCODE_TEXT, check_caption
from .training_inputs import Caption, caption_entries, plain_entry
from .training_request import PreviewSettings

_SUBFOLDER = "ferry_previews"
_SCHEDULE = "simple"


@dataclass(frozen=True)
class PreviewInputs:
    """What a person may connect for previews; each may be missing.

    Attributes:
        vae: Decodes the pictures; without it they are rough colours of the latent.
        positive: A CONDITIONING to show; without it the first caption of the data.
        negative: The other side of CFG.
    """

    vae: Any = None
    positive: list | None = None
    negative: list | None = None


def check_preview(
    model: Any, settings: PreviewSettings, inputs: PreviewInputs, samples: Sequence[SampleSource]
) -> None:
    """Refuse previews that could not be made, hours before the first of them.

    Raises:
        RequestError: If a prompt could not be shown, CFG has no negative, nothing turns a latent into
            colours, or the VAE is another model's.
    """
    prompts = {"preview_positive": inputs.positive, "preview_negative": inputs.negative}
    for name, conditioning in prompts.items():
        if conditioning is not None:
            _check_prompt(model, name, conditioning, like=samples[0].read().condition.entry)
    channels = model.get_model_object("latent_format").latent_channels
    decoded = getattr(inputs.vae, "latent_channels", channels)
    if decoded != channels:
        raise RequestError(
            f"a preview_vae for latents of {decoded} channels was connected",
            limit=f"{type(model.model).__name__} makes latents of {channels}",
            way_out="Connect the VAE that belongs to the model, or none",
        )
    if settings.cfg != 1.0 and not inputs.negative:
        raise RequestError(
            f"preview_cfg={settings.cfg} was asked without preview_negative",
            limit="CFG compares two prompts",
            way_out="Connect preview_negative, or set preview_cfg to 1",
        )
    if settings.every and not can_show(model, inputs):
        raise RequestError(
            f"preview_every={settings.every} was asked without preview_vae",
            limit=f"ComfyUI knows no rough colours for the latents of {type(model.model).__name__}",
            way_out="Connect the VAE, or set preview_every to 0",
        )


def _check_prompt(model: Any, name: str, conditioning: Any, *, like: list) -> None:
    """Refuse what is not one caption of the same kind as ``like``, the first one that is trained on."""
    entries = caption_entries(name, conditioning)
    if len(entries) != 1:
        raise RequestError(
            f"{name} has {len(entries)} prompts",
            limit="A preview shows one",
            way_out="Connect one text encode node",
        )
    check_caption(model, name, entries[0])
    own, trained = (_shape_of(entry) for entry in (entries[0], like))
    if own != trained:
        raise RequestError(
            f"{name} has {own}",
            limit=f"The captions that are trained on have {trained}",
            way_out=ENCODE_TEXT,
        )


def _shape_of(entry: list) -> str:
    pooled = entry[1].get("pooled_output")
    more = "" if pooled is None else f" and {pooled.shape[-1]} pooled ones"
    return f"{entry[0].shape[-1]} channels{more}"


def can_show(model: Any, inputs: PreviewInputs) -> bool:
    """Return whether a latent of ``model`` can be turned into a picture."""
    return inputs.vae is not None or _rgb_factors(model) is not None


class Previewer:
    """Makes previews of one training.

    Args:
        model: The MODEL, for its latent format.
        settings: Steps, CFG.
        inputs: What is connected.
        samples: The data; the first of it gives the size and, unless another is connected, the caption.
        seed: Of the noise; every preview starts from the same.
    """

    def __init__(
        self,
        model: Any,
        settings: PreviewSettings,
        inputs: PreviewInputs,
        *,
        samples: Sequence[SampleSource],
        seed: int,
    ) -> None:
        self.model = model
        self.settings = settings
        self.inputs = inputs
        self.samples = samples
        self.seed = seed

    def make(self, training: Training) -> dict[str, str]:
        """Sample, write a PNG to ComfyUI's temp folder, and return it as ComfyUI names files."""
        with training.weights.final(), torch.no_grad():
            latent = self._sample(training.process)
        picture = self._decode(latent)
        name = f"{uuid.uuid4().hex}_{training.step:08}.png"
        folder = Path(folder_paths.get_temp_directory()) / _SUBFOLDER
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture).save(folder / name)
        return {"filename": name, "subfolder": _SUBFOLDER, "type": "temp"}

    def _sample(self, process: Any) -> Tensor:
        """Return a clean latent ``(1, C, ...)`` as a sampler node would, on the training device."""
        sample = self.samples[0].read()
        clean, caption = sample.latent, sample.condition
        if self.inputs.positive:
            caption = Caption(plain_entry(self.inputs.positive[0]), clean)
        negative = self.inputs.negative
        other = Caption(plain_entry(negative[0]), clean) if negative and self.settings.cfg != 1.0 else None
        sampling = process.model.model_sampling
        sigmas = comfy.samplers.calculate_sigmas(sampling, _SCHEDULE, self.settings.steps).to(process.device)
        random = torch.Generator().manual_seed(self.seed)
        noise = torch.randn(clean.shape, generator=random).to(process.device)
        if process.levels.is_whole:
            start = sampling.noise_scaling(sigmas[0], noise, torch.zeros_like(noise), True)
        else:
            sigmas = _within(sigmas, process.levels)
            start = sampling.noise_scaling(sigmas[0], noise, clean.to(process.device), False)

        def predict(x: Tensor, sigma: Tensor) -> Tensor:
            # A cancel does not wait for the picture.
            comfy.model_management.throw_exception_if_processing_interrupted()
            positive = process.denoise(x, sigma, [caption])
            if other is None:
                return positive
            away = process.denoise(x, sigma, [other])
            return away + self.settings.cfg * (positive - away)

        end = comfy.k_diffusion.sampling.sample_euler(predict, start, sigmas, disable=True)
        return process.model.process_latent_out(sampling.inverse_noise_scaling(sigmas[-1], end).float())

    def _decode(self, latent: Tensor) -> np.ndarray:
        """Return the picture, or a video's first frame, ``(H, W, 3)`` uint8."""
        if self.inputs.vae is None:
            colours = self._rough_colours(latent)
        else:
            with torch.inference_mode():
                decoded = self.inputs.vae.decode(latent)
            # The VAE goes again, so that the next step has the memory that the last one had.
            comfy.model_management.unload_all_models()
            comfy.model_management.soft_empty_cache()
            colours = decoded.reshape(-1, *decoded.shape[-3:])[0]
        return (colours.clamp(0, 1) * 255).round().to("cpu", torch.uint8).numpy()

    def _rough_colours(self, latent: Tensor) -> Tensor:
        latent_format = self.model.get_model_object("latent_format")
        factors = _rgb_factors(self.model)
        reshape = getattr(latent_format, "latent_rgb_factors_reshape", None)
        latent = reshape(latent) if reshape is not None else latent
        frame = latent[0, :, 0] if latent.ndim == 5 else latent[0]
        colours = frame.float().cpu().movedim(0, -1) @ torch.tensor(factors)
        bias = getattr(latent_format, "latent_rgb_factors_bias", None)
        return ((colours if bias is None else colours + torch.tensor(bias)) + 1) / 2


def _within(sigmas: Tensor, levels: NoiseLevels) -> Tensor:
    """Return the steps of an expert: from its highest level to its lowest, and from there to a clean picture.

    An expert for little noise cannot begin at pure noise: it goes on from the data's picture with noise on.
    One for much noise ends with what it takes the clean picture for.
    """
    own = sigmas[(sigmas >= levels.lowest) & (sigmas > 0)]
    if levels.highest < 1.0:
        own = torch.cat([own.new_tensor([levels.highest]), own[own < levels.highest]])
    return torch.cat([own, own.new_zeros(1)])


def _rgb_factors(model: Any) -> Any:
    return getattr(model.get_model_object("latent_format"), "latent_rgb_factors", None)
