"""Per-model parallel plans: data only, keyed by the path of the model's class."""

from .registry import PLANS, find_plan

__all__ = ["PLANS", "find_plan"]
