"""Find the plan of a model class by its dotted path."""

from __future__ import annotations

from ..errors import RequestError
from ..parallel.plan import ModelPlan
from . import (
    flux,
    hunyuan_video,
    lightricks,
    qwen_image,
    stable_diffusion_3,
    stable_diffusion_xl,
    text_encoders,
    wan,
    z_image,
)

PLANS: tuple[ModelPlan, ...] = (
    flux.PLAN,
    qwen_image.PLAN,
    wan.PLAN,
    z_image.PLAN,
    stable_diffusion_3.PLAN,
    hunyuan_video.PLAN,
    lightricks.VIDEO_PLAN,
    lightricks.AUDIO_VIDEO_PLAN,
    stable_diffusion_xl.PLAN,
)

TEXT_ENCODER_PLANS: tuple[ModelPlan, ...] = text_encoders.PLANS


def find_text_encoder_plan(class_path: str) -> ModelPlan:
    """Return the plan of exactly this text encoder class.

    Args:
        class_path: For example ``comfy.text_encoders.t5.T5``.

    Raises:
        RequestError: If there is none; the message lists the classes that have one.
    """
    return _find(
        TEXT_ENCODER_PLANS,
        class_path,
        asked=f"sharing the weights of the text encoder {class_path} was asked",
        limit="Text encoders with a plan are",
        way_out="Encode on one GPU",
    )


def find_plan(class_path: str) -> ModelPlan:
    """Return the plan of exactly this class; a subclass has another forward and is not covered.

    Args:
        class_path: For example ``comfy.ldm.flux.model.Flux``.

    Raises:
        RequestError: If there is none; the message lists the classes that have one.
    """
    return _find(
        PLANS,
        class_path,
        asked=f"parallel sampling of {class_path} was asked",
        limit="Models with a parallel plan are",
        way_out="Use one of them, or sample this model with a stock KSampler on one GPU",
    )


def _find(
    plans: tuple[ModelPlan, ...], class_path: str, *, asked: str, limit: str, way_out: str
) -> ModelPlan:
    for plan in plans:
        if plan.class_path == class_path:
            return plan
    supported = ", ".join(f"{plan.name} ({plan.class_path})" for plan in plans)
    raise RequestError(asked, limit=f"{limit} {supported}", way_out=way_out)
