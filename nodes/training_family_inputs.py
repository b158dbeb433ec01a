"""Inputs of the training node that came later: cached data, what a model's family decides, budgets, GPUs."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..core.comfy_adapter import AUTO, AUTO_GUIDANCE, NOISE_RANGES
from ..core.training import LOSS_WEIGHTINGS, TIMESTEP_SAMPLINGS
from .schema import advanced
from .types import TrainingCacheSocket


def family_inputs() -> list[Any]:
    """Return inputs that came later: optional and last, so that prompts saved without them keep working."""

    def extra(kind: Any, name: str, **arguments: Any) -> Any:
        return advanced(kind.Input(name, optional=True, **arguments))

    return [
        TrainingCacheSocket.Input(
            "training_data",
            optional=True,
            tooltip="From Cache Training Data, in place of latents and positive. Read from disk as needed.",
        ),
        extra(
            io.Combo,
            "timestep_sampling",
            options=[AUTO, *TIMESTEP_SAMPLINGS],
            default=AUTO,
            tooltip="Which times are drawn: all alike, or most in the middle. auto: what suits the family.",
        ),
        extra(
            io.Float,
            "timestep_shift",
            default=0.0,
            min=0.0,
            max=100.0,
            step=0.01,
            tooltip="Above 1 trains more on noise. 0: what suits the family, else as the model samples.",
        ),
        extra(
            io.Combo,
            "loss_weighting",
            options=[AUTO, *LOSS_WEIGHTINGS],
            default=AUTO,
            tooltip="min_snr lets nearly clean pictures count less; for SDXL and others that predict noise.",
        ),
        extra(
            io.Float,
            "guidance",
            default=AUTO_GUIDANCE,
            min=AUTO_GUIDANCE,
            max=100.0,
            step=0.1,
            tooltip="For models with a built-in guidance scale (FLUX.1-dev). -1: the captions' own, else 1.",
        ),
        extra(
            io.Combo,
            "noise_range",
            options=list(NOISE_RANGES),
            default=AUTO,
            tooltip="For the experts of Wan 2.2 14B: train the high-noise model with high, the low-noise "
            "model with low. auto: all noise.",
        ),
        extra(
            io.Int,
            "gpus",
            default=1,
            min=1,
            max=64,
            tooltip="GPUs that share the forward passes of each step (grad_accumulation_steps, a multiple of "
            "it): faster, with the same result. RAM holds the model once.",
        ),
        extra(
            io.Float,
            "vram_budget_gb",
            default=0.0,
            min=0.0,
            max=1024.0,
            step=0.1,
            tooltip="GB of VRAM that the training may take on each GPU: more keeps more weights there and is "
            "faster. 0: auto, the budget in Settings > Ferry if one is set there, else what is free.",
        ),
        extra(
            io.Float,
            "ram_budget_gb",
            default=0.0,
            min=0.0,
            max=65536.0,
            step=0.1,
            tooltip="GB of RAM that the model's weights may take; more is refused before anything runs. 0: "
            "auto, the budget in Settings > Ferry if one is set there, else no limit.",
        ),
    ]
