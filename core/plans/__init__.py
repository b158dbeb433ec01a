"""What is known of each model class: data only, keyed by the path of the class."""

from .modulation import find_modulation
from .registry import PLANS, TEXT_ENCODER_PLANS, find_plan, find_text_encoder_plan

__all__ = ["PLANS", "TEXT_ENCODER_PLANS", "find_modulation", "find_plan", "find_text_encoder_plan"]
