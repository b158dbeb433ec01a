"""What is known of each model class: data only, keyed by the path of the class."""

from .modulation import find_modulation
from .registry import PLANS, find_plan

__all__ = ["PLANS", "find_modulation", "find_plan"]
