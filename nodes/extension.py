"""The one list of the pack's node classes."""

from __future__ import annotations

from comfy_api.latest import ComfyExtension, io

from ..core.comfy_adapter import register_parallel_routes, register_training_routes
from .conditioning import LoadConditioning, SaveConditioning
from .dataset import CacheTrainingData, LoadTrainingFolder, TrainingSetImages
from .degree_planner import PlanParallelDegrees
from .doctor import FerryDoctor
from .offload import LoadDiffusionModelOffload, OffloadModel
from .parallel import ParallelModel
from .parallel_encoders import ParallelTextEncoder, ParallelVae
from .sampling import ParallelSampler
from .training import TrainLoraOffload

NODES: list[type[io.ComfyNode]] = [
    ParallelModel,
    ParallelSampler,
    ParallelVae,
    ParallelTextEncoder,
    PlanParallelDegrees,
    FerryDoctor,
    LoadTrainingFolder,
    TrainingSetImages,
    CacheTrainingData,
    LoadDiffusionModelOffload,
    OffloadModel,
    TrainLoraOffload,
    LoadConditioning,
    SaveConditioning,
]


class FerryExtension(ComfyExtension):
    """What ComfyUI asks for the pack's nodes."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        """Return every node class of the pack, and add its routes to the server."""
        register_training_routes()
        register_parallel_routes()
        return NODES
