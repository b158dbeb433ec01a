"""Parallel engine: split one model's forward over ranks, by a plan, exactly.

Works on any ``torch`` module whose class has a plan. Plain PyTorch: it knows no ComfyUI.
"""

from .attention.cudnn import with_cudnn
from .batch import batch_size, join_batch, split_batch
from .collectives import all_reduce
from .compiled_blocks import CompiledBlocks, repeated_blocks
from .cost_model import AttentionWork, DenoiserWork, Machine, Prediction, predict
from .cp_plan import CpPlanHandle, parallelize_cp_plan
from .dry_run import count_work
from .exchange_timer import ExchangeTimer
from .mesh import ParallelDims, RankLayout, SequenceGroup, build_mesh, input_name
from .parallelize import ParallelHandle, install_parallel, parallelize
from .plan import ModelPlan, ParallelMethod
from .plan_check import check_plan, head_count, validate_model
from .planner import DegreePlan, choose_degrees
from .recorded_forward import RecordedForward
from .refused_inputs import refuse_inputs
from .sharding import attend, gather, shard
from .spatial_parallel import SpatialHandle, cut_dim, parallelize_decoder
from .spatial_plan import SpatialPlan, SpatialRole, dotted_path, planned_modules
from .tensor_parallel import TensorParallelHandle
from .tensor_shards import TensorPart, TensorShards, join_pieces, largest_rank_bytes
from .tensor_units import max_tensor_degree
from .tp_plan import read_tp_plan

__all__ = [
    "all_reduce",
    "batch_size",
    "join_batch",
    "split_batch",
    "SpatialHandle",
    "SpatialPlan",
    "SpatialRole",
    "cut_dim",
    "dotted_path",
    "parallelize_decoder",
    "planned_modules",
    "repeated_blocks",
    "CompiledBlocks",
    "with_cudnn",
    "RecordedForward",
    "CpPlanHandle",
    "attend",
    "gather",
    "parallelize_cp_plan",
    "read_tp_plan",
    "refuse_inputs",
    "shard",
    "predict",
    "choose_degrees",
    "Prediction",
    "Machine",
    "DenoiserWork",
    "DegreePlan",
    "ExchangeTimer",
    "AttentionWork",
    "ModelPlan",
    "ParallelDims",
    "ParallelHandle",
    "ParallelMethod",
    "RankLayout",
    "SequenceGroup",
    "TensorParallelHandle",
    "TensorPart",
    "TensorShards",
    "build_mesh",
    "check_plan",
    "count_work",
    "head_count",
    "install_parallel",
    "input_name",
    "join_pieces",
    "largest_rank_bytes",
    "max_tensor_degree",
    "parallelize",
    "validate_model",
]
