"""Fill in what a person left at ``auto`` on the training node, from the model's family."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import RequestError
from ..training import OPTIMIZERS, Range, auto_learning_rate, check_number, split_patterns
from ..training.families import FamilyDefaults, find_family
from .user_settings import default_budget_gb

AUTO = "auto"
NOISE_RANGES = (AUTO, "all", "high", "low")
AUTO_GUIDANCE = -1.0
"""A guidance scale of 0 is one, so that cannot stand for auto."""

_LATER_INPUTS = {
    "timestep_sampling": AUTO,
    "timestep_shift": 0.0,
    "loss_weighting": AUTO,
    "guidance": AUTO_GUIDANCE,
    "noise_range": AUTO,
    "gpus": 1,
    "vram_budget_gb": 0.0,
    "ram_budget_gb": 0.0,
}
"""Inputs that prompts saved by earlier versions do not have."""

# A value that comes over a link is of any kind.
_TEXTS = (
    "algorithm", "loss_function", "loss_weighting", "lora_dtype", "lr_schedule", "noise_range", "optimizer",
    "resume_from", "save_prefix", "targets", "timestep_sampling", "training_dtype",
)  # fmt: skip
_SWITCHES = ("gradient_checkpointing", "offload", "optimizer_on_cpu")
_NUMBERS = {
    "rank": Range(0, whole=True),
    "alpha": Range(0),
    "learning_rate": Range(0),
    "timestep_shift": Range(0),
    "split_threshold_mb": Range(0),
    "vram_budget_gb": Range(0),
    "ram_budget_gb": Range(0),
    "gpus": Range(1, whole=True),
}


@dataclass(frozen=True)
class FilledWidgets:
    """The node's values without ``auto``.

    Attributes:
        values: By the inputs' names.
        plan: One line for the person: what is trained how, and what was taken from the family.
    """

    values: dict[str, Any]
    plan: str


def model_family(model: Any) -> FamilyDefaults:
    """Return the defaults of a MODEL's family, found by its class and configuration."""
    network = type(model.model.diffusion_model)
    config = getattr(model.model.model_config, "unet_config", {})
    return find_family(f"{network.__module__}.{network.__qualname__}", config)


def fill_auto(model: Any, widgets: dict[str, Any]) -> FilledWidgets:
    """Return the node's values with every ``auto`` (and 0, where that stands for it) filled in.

    Args:
        model: The MODEL (``ModelPatcher``).
        widgets: The node's values as they came.

    Raises:
        RequestError: If a value is of another kind than its input, an expert's noise range or a guidance
            scale is asked of a model without, or a learning rate on auto of an optimizer without.
    """
    family = model_family(model)
    values = _LATER_INPUTS | widgets
    _check_kinds(values)
    _check_guidance(model, family, values["guidance"])
    patterns, extras = split_patterns(values["targets"])
    automatic = {
        "rank": not values["rank"],
        "alpha": not values["alpha"],
        "learning_rate": not values["learning_rate"],
        "targets": not patterns and bool(family.targets),
        "loss_function": values["loss_function"] == AUTO,
        "timestep_sampling": values["timestep_sampling"] == AUTO,
        "timestep_shift": not values["timestep_shift"] and family.shift is not None,
        "loss_weighting": values["loss_weighting"] == AUTO,
        "guidance": values["guidance"] == AUTO_GUIDANCE and family.guidance is not None,
    }
    rank = values["rank"] or family.rank
    defaults = {
        "rank": rank,
        # A rank of one's own keeps the family's proportion, so that the learning rate still fits.
        "alpha": family.alpha / family.rank * rank,
        "learning_rate": _rate(family, values),
        "targets": ", ".join([family.targets, *sorted(extras)]),
        "loss_function": family.loss,
        "timestep_sampling": family.timestep_sampling,
        "timestep_shift": family.shift,
        "loss_weighting": family.loss_weighting,
        "guidance": family.guidance,
    }
    if values.get("offload", True):
        for kind in ("vram", "ram"):
            name = f"{kind}_budget_gb"
            defaults[name] = default_budget_gb(kind)
            automatic[name] = not values[name] and defaults[name] > 0
    values |= {name: defaults[name] for name, is_automatic in automatic.items() if is_automatic}
    values["guidance_is_default"] = automatic["guidance"]
    values["lowest_noise"], values["highest_noise"] = _noise_range(family, values["noise_range"])
    return FilledWidgets(values, _describe(family, values, automatic))


def _check_kinds(values: dict[str, Any]) -> None:
    """Refuse what cannot be looked at for ``auto``; ranges that depend on nothing are checked here too."""
    for names, kind, words in ((_TEXTS, str, "a text"), (_SWITCHES, bool, "true or false")):
        for name in names:
            if name in values and not isinstance(values[name], kind):
                raise RequestError(
                    f"{name}={values[name]!r} was asked",
                    limit=f"It must be {words}, not of the kind {type(values[name]).__name__}",
                    way_out=f"Change {name}, or what is linked to it",
                )
    for name, allowed in _NUMBERS.items():
        if name in values:
            check_number(name, values[name], allowed)
    if values["noise_range"] not in NOISE_RANGES:
        raise RequestError(
            f"noise_range={values['noise_range']!r} was asked",
            limit=f"Known are {list(NOISE_RANGES)}",
            way_out="Set noise_range to one of them",
        )


def _rate(family: FamilyDefaults, values: dict[str, Any]) -> float:
    asked, optimizer = values["learning_rate"], values["optimizer"]
    # An unknown optimizer is refused by the training's own check, which names the known ones.
    return asked or (
        auto_learning_rate(optimizer, family.learning_rate)
        if optimizer in OPTIMIZERS
        else family.learning_rate
    )


def _check_guidance(model: Any, family: FamilyDefaults, asked: float) -> None:
    has_guidance = bool(getattr(model.model.model_config, "unet_config", {}).get("guidance_embed"))
    if asked != AUTO_GUIDANCE:
        check_number("guidance", asked, Range(0))
    if asked != AUTO_GUIDANCE and not has_guidance:
        raise RequestError(
            f"guidance={asked:g} was asked for a model of the family {family.name}",
            limit="It has no built-in guidance scale and would not see it",
            way_out="Set guidance to -1",
        )


def _noise_range(family: FamilyDefaults, asked: str) -> tuple[float, float]:
    if asked in (AUTO, "all"):
        return 0.0, 1.0
    if family.expert_boundary is None:
        raise RequestError(
            f"noise_range={asked!r} was asked for a model of the family {family.name}",
            limit="Only families with a high-noise and a low-noise expert have such ranges (Wan 2.2 14B)",
            way_out="Set noise_range to auto",
        )
    return (family.expert_boundary, 1.0) if asked == "high" else (0.0, family.expert_boundary)


def _layers(targets: str) -> str:
    patterns, extras = split_patterns(targets)
    return ", ".join([*(patterns or ["attention and MLP of all blocks"]), *sorted(extras)])


def _describe(family: FamilyDefaults, values: dict[str, Any], automatic: dict[str, bool]) -> str:
    def part(name: str, text: str) -> str:
        return f"{text} (auto)" if automatic.get(name) else text

    shift = values["timestep_shift"]
    parts = [
        part("rank", f"rank {values['rank']}"),
        part("alpha", f"alpha {values['alpha']:g}"),
        part("learning_rate", f"learning rate {values['learning_rate']:g}"),
        part("targets", f"layers {_layers(values['targets'])}"),
        part("loss_function", f"{values['loss_function']} loss"),
        part("timestep_sampling", f"{values['timestep_sampling']} noise levels"),
        part("timestep_shift", f"shift {shift:g}" if shift else "the model's own shift"),
    ]
    if values["loss_weighting"] != "none":
        parts.append(part("loss_weighting", f"{values['loss_weighting']} weights"))
    if values["guidance"] != AUTO_GUIDANCE:
        parts.append(part("guidance", f"guidance {values['guidance']:g}"))
    if family.expert_boundary is not None and values["noise_range"] == AUTO:
        parts.append("all noise (for an expert of Wan 2.2 14B choose noise_range)")
    if (values["lowest_noise"], values["highest_noise"]) != (0.0, 1.0):
        parts.append(f"noise {values['lowest_noise']:g} to {values['highest_noise']:g}")
    if values["gpus"] > 1:
        parts.append(f"{values['gpus']} GPUs")
    for kind in ("vram", "ram"):
        if automatic.get(name := f"{kind}_budget_gb"):
            parts.append(f"{values[name]:g} GB of {kind.upper()} (Settings > Ferry)")
    return f"{family.name}: {', '.join(parts)}"
