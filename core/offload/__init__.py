"""Layer offload: train or run a model whose weights stay on the host, a part at a time on the target.

``OffloadTrainingManager`` attaches to any ``torch.nn.Module`` and comes off again; the model's code
is not touched. Plain PyTorch; it knows neither ComfyUI nor LoRA.

Files, from the outside in: ``manager`` attaches (by the steps in ``attach``) and removes; ``engine``
and ``hooks`` say what happens when; ``residency`` is the cache, ``slots`` and ``transfer`` the target
memory and the copies; ``store``, ``buckets``, ``segments`` and ``pinned_arena`` the masters;
``tensors``, ``wrappers``, ``module_dicts`` and ``replacements`` how the model sees them;
``saved_tensors`` and ``gradients`` what autograd sees; ``gradient_memory`` and ``host_worker`` where
gradients arrive and are added; ``host_steps``, ``fused_steps`` and ``overlapped_steps`` the optimizer's
step on the host, ``optimizer_calls``, ``master_steps`` and ``update_queue`` how it is done in parts;
``layer_major`` accumulation block by block; ``retry`` what follows running out of
memory; ``unobserved`` keeps the engine's own operations out of sight; ``modulation`` keeps what small
frozen layers returned, ``modulation_layers`` and ``modulation_store`` say for which layers and how, and
``external_reads`` how that goes together with CUDA graphs;
``planner`` and ``prediction`` decide what stays on the target, from what ``tuner`` and ``step_timer``
measure; ``pinning``, ``staging`` and ``shared_masters`` are the arena's limits, the way around them,
and one host copy for several processes.

``ModelStreamer`` runs a frozen model without gradients within a budget; its files begin with
``stream``: ``streamer`` loads and unloads, ``stream_flow`` says when blocks move, ``stream_arrangement``
and ``stream_residents`` what of each stays, ``stream_buffers`` holds what several models share,
``stream_block``, ``stream_part``, ``stream_masters`` and ``stream_blocks`` are one block's tensors, bytes
and place in the model. ``mapped_file`` and ``weight_files`` read safetensors without a copy;
``packed_weight`` and ``gguf_blocks`` are weights that stay quantized until they are used; ``host_parts``
stands for parts of tensors that somebody else holds, ``host_runs`` and ``row_copies`` move them.
"""

from .budget import OffloadBudget
from .external_reads import Reader, reading
from .gguf_blocks import GGUF_FORMATS, GgufFormat, dequantize
from .host_parts import HostParts
from .layer_major import BlockSequence, backward_layer_major
from .manager import OffloadTrainingManager
from .mapped_file import MappedFile
from .modulation import ModulationCache
from .modulation_layers import ModulationLayers, ModulationPlan
from .packed_weight import PackedWeight
from .pinning import HostPinning
from .planner import ResidencyPlan, plan_residency
from .prediction import BucketProfile, OffloadProfile, Prediction, predict
from .retry import retry_on_oom
from .shared_masters import SharedMasters
from .stats import OffloadStats
from .step_clock import StepStats
from .stream_buffers import StreamPool
from .stream_config import StreamConfig
from .stream_masters import alias, point_at
from .stream_needs import least_stream_bytes
from .stream_part import WeightChange
from .stream_stats import StreamStats
from .streamer import ModelStreamer
from .weight_files import WeightFile

__all__ = [
    "GGUF_FORMATS",
    "BlockSequence",
    "BucketProfile",
    "GgufFormat",
    "HostParts",
    "HostPinning",
    "MappedFile",
    "ModelStreamer",
    "ModulationCache",
    "ModulationLayers",
    "ModulationPlan",
    "OffloadBudget",
    "OffloadProfile",
    "OffloadStats",
    "OffloadTrainingManager",
    "PackedWeight",
    "Prediction",
    "Reader",
    "ResidencyPlan",
    "SharedMasters",
    "StepStats",
    "StreamConfig",
    "StreamPool",
    "StreamStats",
    "WeightChange",
    "WeightFile",
    "alias",
    "backward_layer_major",
    "dequantize",
    "least_stream_bytes",
    "plan_residency",
    "point_at",
    "predict",
    "reading",
    "retry_on_oom",
]
