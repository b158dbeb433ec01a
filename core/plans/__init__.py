"""What is known of each model class: data only, keyed by the path of the class."""

from .modulation import find_modulation
from .registry import (
    AUTOENCODER_PLANS,
    PLANS,
    TEXT_ENCODER_PLANS,
    find_autoencoder_plan,
    find_plan,
    find_text_encoder_plan,
)

__all__ = [
    "AUTOENCODER_PLANS",
    "PLANS",
    "TEXT_ENCODER_PLANS",
    "find_autoencoder_plan",
    "find_modulation",
    "find_plan",
    "find_text_encoder_plan",
]
