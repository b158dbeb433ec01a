"""Find the plan of a model class by its dotted path."""

from __future__ import annotations

from ..errors import RequestError
from ..parallel.plan import ModelPlan
from ..parallel.spatial_plan import SpatialPlan
from . import (
    autoencoders,
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

AUTOENCODER_PLANS: tuple[SpatialPlan, ...] = autoencoders.PLANS


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


def find_autoencoder_plan(class_path: str, decoder_path: str) -> SpatialPlan:
    """Return the plan of an autoencoder class that holds a decoder of exactly this class.

    Args:
        class_path: For example ``comfy.ldm.models.autoencoder.AutoencoderKL``.
        decoder_path: For example ``comfy.ldm.modules.diffusionmodules.model.Decoder``.

    Raises:
        RequestError: If there is none; the message lists those that have one.
    """
    for plan in AUTOENCODER_PLANS:
        if (plan.class_path, plan.decoder_path) == (class_path, decoder_path):
            return plan
    supported = ", ".join(f"{plan.name} ({plan.class_path})" for plan in AUTOENCODER_PLANS)
    raise RequestError(
        f"parallel decoding by {class_path} with the decoder {decoder_path} was asked",
        limit=f"VAEs with a plan are {supported}",
        way_out="Decode with this VAE on one GPU",
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
