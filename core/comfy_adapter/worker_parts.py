"""What workers can hold of a user's models: a diffusion model, a VAE's decoder, a text encoder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..parallel import ParallelDims, largest_rank_bytes
from ..plans import find_plan
from .model_export import class_path, describe_model
from .patch_messages import PREFIX


@dataclass(frozen=True)
class WorkerPart:
    """One module for the workers.

    Attributes:
        owner: The object whose life the workers' copy follows, and by which they know it.
        module: Holds the weights.
        kind: "denoiser", "decoder" or "encoder".
        dims: Degrees by which the ranks share it.
        describe: Returns the message from which a worker builds the module, empty.
        num_bytes: Weights of the fullest worker.
        patch_prefix: How names of this module's weights begin in ``ModelPatcher.patches``.
    """

    owner: Any
    module: nn.Module
    kind: str
    dims: ParallelDims
    describe: Callable[[], dict[str, Any]]
    num_bytes: int
    patch_prefix: str = PREFIX


def denoiser_part(model: Any, dims: ParallelDims) -> WorkerPart:
    """Return the part of a ``BaseModel``."""
    module = model.diffusion_model
    return WorkerPart(
        owner=model,
        module=module,
        kind="denoiser",
        dims=dims,
        describe=lambda: describe_model(model),
        num_bytes=largest_rank_bytes(module, find_plan(class_path(module)), dims.tp),
    )
