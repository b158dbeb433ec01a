"""A ComfyUI model as the ``DiffusionProcess`` that the trainer wants.

Everything about the model type (flow, epsilon, v) comes from its own ``model_sampling``, everything
about its conditioning from its own ``extra_conds``, as in sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import comfy.model_patcher
import comfy.model_sampling
import comfy.sampler_helpers
import comfy.samplers
import torch
from torch import Tensor

from ..errors import RequestError
from ..training import MIN_SNR_GAMMA, NoiseLevels, seed_torch, shifted
from .caption_checks import ENCODE_TEXT, check_are_read, refuse_misfits
from .text_widths import check_widths, text_widths
from .training_inputs import Caption

# Halvings of (0, 1): past the precision of a double.
_BISECTIONS = 60
_IMAGE_TO_IMAGE = ("IMG_TO_IMG", "IMG_TO_IMG_FLOW")


def check_noise_model(model: Any) -> None:
    """Refuse a model that maps pictures to pictures instead of removing noise.

    Raises:
        RequestError: Naming its sampling class.
    """
    sampling = model.get_model_object("model_sampling")
    kinds = [getattr(comfy.model_sampling, name, None) for name in _IMAGE_TO_IMAGE]
    if any(kind is not None and isinstance(sampling, kind) for kind in kinds):
        raise RequestError(
            f"training {type(model.model).__name__} was asked",
            limit="It maps a picture to a picture in one step; there is no noise to learn from",
            way_out="Use a diffusion or flow model",
        )


@dataclass(frozen=True)
class CaptionGroup:
    """Rows of a batch whose captions have one shape, so that they run in one call.

    Attributes:
        rows: Their indices.
        conds: The model's own arguments of each.
    """

    rows: list[int]
    conds: list[dict[str, Any]]


def check_noise_levels(model: Any, levels: NoiseLevels) -> None:
    """Refuse noise levels that the model's schedule does not have.

    Raises:
        RequestError: Naming the input.
    """
    is_flow = isinstance(model.get_model_object("model_sampling"), comfy.model_sampling.CONST)
    name = type(model.model).__name__
    if is_flow and levels.weighting == "min_snr":
        raise RequestError(
            f"loss_weighting='min_snr' was asked for {name}",
            limit="It is made for noise and v prediction; this is a flow model with a velocity loss",
            way_out="Set loss_weighting to auto or none",
        )
    if not is_flow and (levels.shift is not None or not levels.is_whole):
        raise RequestError(
            f"timestep_shift={levels.shift}, noise levels {levels.lowest} to {levels.highest} were asked for "
            f"{name}",
            limit="Only flow models have a time shift and noise levels from 0 to 1",
            way_out="Set timestep_shift to 0 and noise_range to auto",
        )


class ComfyProcess:
    """The denoiser of a patched model.

    Args:
        patcher: A ``ModelPatcher`` whose model is ready to compute on ``device``.
        device: The training device.
        seed: For models whose conditioning is random (unCLIP noise augmentation).
        levels: Which noise levels come how often; checked by ``check_noise_levels`` before.
    """

    def __init__(
        self, patcher: Any, device: torch.device, *, seed: int, levels: NoiseLevels | None = None
    ) -> None:
        self.patcher = patcher
        self.model = patcher.model
        self.device = device
        self.seed = seed
        self.levels = levels or NoiseLevels()
        self._reads_references = False  # seen to
        self._computed: set[str] = set()  # shapes of latent and caption that the model has computed
        self._text_widths = text_widths(self.model.diffusion_model)
        self._quantiles = (self._quantile_of(self.levels.lowest), self._quantile_of(self.levels.highest))

    def sigmas(self, positions: Tensor) -> Tensor:
        """Return the noise levels at the quantiles ``positions`` ``(B,)`` of their distribution."""
        low, high = self._quantiles
        quantiles = [low + (high - low) * float(position) for position in positions]
        sigmas = [self._sigma_at(self.levels.time(quantile)) for quantile in quantiles]
        return torch.tensor(sigmas, dtype=torch.float32, device=self.device)

    def _sigma_at(self, time: float) -> float:
        if self.levels.shift is not None:
            return shifted(time, self.levels.shift)
        return float(self.model.model_sampling.percent_to_sigma(1.0 - time))

    def _quantile_of(self, level: float) -> float:
        """Return the share of noise levels below ``level``, 0 to 1."""
        if level in (0.0, 1.0):
            return level
        low, high = 0.0, 1.0
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            low, high = (middle, high) if self._sigma_at(middle) < level else (low, middle)
        return self.levels.quantile((low + high) / 2)

    def add_noise(self, clean: Tensor, noise: Tensor, sigma: Tensor) -> Tensor:
        """Return the noisy samples as the sampler starts from them."""
        return self.model.model_sampling.noise_scaling(sigma, noise, clean, False)

    def output_scale(self, sigma: Tensor) -> Tensor:
        """Return the derivative of the clean prediction by the network's output, ``(B,)``."""
        ones = torch.ones((len(sigma), 1), device=sigma.device)
        return self.model.model_sampling.calculate_denoised(sigma, ones, torch.zeros_like(ones)).view(-1)

    def loss_weight(self, sigma: Tensor) -> Tensor:
        """Return the weight of each loss, ``(B,)``.

        min-SNR weights the error of the clean prediction by ``min(SNR, gamma)``; the error of the output
        is that divided by the output's scale.
        """
        if self.levels.weighting == "none":
            return torch.ones_like(sigma)
        return sigma.pow(-2).clamp(max=MIN_SNR_GAMMA) * self.output_scale(sigma).square()

    def denoise(self, noisy: Tensor, sigma: Tensor, conditions: Sequence[Caption]) -> Tensor:
        """Return the predicted clean samples; captions of different shapes run as separate batches."""
        outputs: list[Tensor | None] = [None] * len(conditions)
        groups = self.groups(noisy, conditions)
        for group, seed in zip(groups, draw_seeds(len(groups)), strict=True):
            seed_torch(seed, self.device)
            output = self.run_group(group, noisy, sigma)
            for row, index in enumerate(group.rows):
                outputs[index] = output[row : row + 1]
        return torch.cat([output for output in outputs if output is not None])

    @torch.no_grad()
    def groups(self, noisy: Tensor, conditions: Sequence[Caption]) -> list[CaptionGroup]:
        """Return the calls that a batch takes."""
        groups: list[CaptionGroup] = []
        for index, caption in enumerate(conditions):
            cond = self._model_conds(noisy[index : index + 1], caption)
            group = next((group for group in groups if _same_shape(group.conds[0], cond)), None)
            if group is None:
                groups.append(CaptionGroup([index], [cond]))
            else:
                group.rows.append(index)
                group.conds.append(cond)
        return groups

    def run_group(self, group: CaptionGroup, noisy: Tensor, sigma: Tensor) -> Tensor:
        """Return the predicted clean samples of one call, from the batch's ``noisy`` and ``sigma``.

        Raises:
            RequestError: If the model cannot compute a latent with a caption of such shapes.
        """
        shapes = {name: _shape(cond.cond) for name, cond in group.conds[0].items()}
        kind = repr((noisy.shape[1:], shapes))
        if kind in self._computed:
            return self._apply(noisy[group.rows], sigma[group.rows], group.conds)
        asked = f"a latent of shape {tuple(noisy.shape[1:])} was given with a caption of {shapes}"
        with refuse_misfits(asked, self.model):
            output = self._apply(noisy[group.rows], sigma[group.rows], group.conds)
        self._computed.add(kind)
        return output

    def _model_conds(self, noisy: Tensor, caption: Caption) -> dict[str, Any]:
        """Return one caption as the model's own arguments (pooled output, guidance, references)."""
        model_conds = self._processed(noisy, caption.entry, caption.latent)
        check_widths(self._text_widths, model_conds, model=type(self.model).__name__)
        embedding, options = caption.entry
        if options.get("reference_latents") and not self._reads_references:
            others = {name: value for name, value in options.items() if name != "reference_latents"}
            check_are_read(
                model_conds, self._processed(noisy, [embedding, others], caption.latent), self.model
            )
            self._reads_references = True
        return {name: cond.process_cond(batch_size=1, area=None) for name, cond in model_conds.items()}

    def _processed(self, noisy: Tensor, entry: list, latent: Tensor) -> dict[str, Any]:
        """Return what the model makes of one entry of a CONDITIONING."""
        positive = comfy.sampler_helpers.convert_cond([entry])
        clean = latent.to(self.device)
        with refuse_misfits("a caption that does not fit was given", self.model):
            try:
                processed = comfy.samplers.process_conds(
                    self.model, noisy, {"positive": positive}, self.device, clean, None, self.seed
                )
            except KeyError as error:
                raise RequestError(
                    f"a caption without {error.args[0]} was given",
                    limit=f"{type(self.model).__name__} is conditioned on it",
                    way_out=ENCODE_TEXT,
                ) from error
        return processed["positive"][0]["model_conds"]

    def _apply(self, noisy: Tensor, sigma: Tensor, conds: list[dict[str, Any]]) -> Tensor:
        options = comfy.model_patcher.create_model_options_clone(self.patcher.model_options)
        transformer_options = options.get("transformer_options", {})
        transformer_options["cond_or_uncond"] = [0] * len(conds)
        transformer_options["uuids"] = list(range(len(conds)))
        transformer_options["sigmas"] = sigma
        arguments = comfy.samplers.cond_cat(conds)
        return self.model.apply_model(noisy, sigma, transformer_options=transformer_options, **arguments)


def draw_seeds(count: int) -> list[int]:
    """Return a seed for each call of a batch, from torch's generator on the CPU.

    What a call draws then does not depend on the calls before it, so that any process may compute it.
    """
    return torch.randint(2**62, (count,)).tolist()


def _same_shape(first: dict[str, Any], second: dict[str, Any]) -> bool:
    """Return whether two captions may share a batch, without padding or repeating any of them."""
    if first.keys() != second.keys():
        return False
    return all(
        first[name].can_concat(second[name]) and _shape(first[name].cond) == _shape(second[name].cond)
        for name in first
    )


def _shape(cond: Any) -> Any:
    if isinstance(cond, list | tuple):
        return [_shape(item) for item in cond]
    return tuple(cond.shape) if isinstance(cond, Tensor) else None
