"""Parallel engine: split one model's forward over ranks, by a plan, exactly.

Works on any ``torch`` module whose class has a plan. Plain PyTorch: it knows no ComfyUI.
"""

from .mesh import ParallelDims, RankLayout, SequenceGroup, build_mesh
from .parallelize import ParallelHandle, parallelize
from .plan import ModelPlan, ParallelMethod
from .plan_check import check_plan, head_count, validate_model

__all__ = [
    "ModelPlan",
    "ParallelDims",
    "ParallelHandle",
    "ParallelMethod",
    "RankLayout",
    "SequenceGroup",
    "build_mesh",
    "check_plan",
    "head_count",
    "parallelize",
    "validate_model",
]
