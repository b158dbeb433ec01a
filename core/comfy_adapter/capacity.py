"""Whether a model and its workers fit host and GPUs; asked before anything is started or loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import comfy.model_management
import torch

from ..errors import RequestError
from ..workers import available_host_bytes, file_backed_bytes
from .model_export import named_tensors

# What a worker takes of the host besides weights: Python, ComfyUI's modules, CUDA's own tables.
_WORKER_HOST_BYTES = {"cpu": 300 << 20, "gpu": 1 << 30}


def check_host(model: Any, devices: Sequence[str], *, shared: bool, running: bool) -> None:
    """Refuse a model whose weights, or workers, the host has no memory for.

    Args:
        model: The ``BaseModel``.
        devices: Device of each worker.
        shared: Whether its weights are in shared memory already.
        running: Whether the workers are there already.

    Raises:
        RequestError: With what is needed and what is left.
    """
    # Weights in ordinary memory move; only those that are still mapped from their file take more.
    weights = 0 if shared else file_backed_bytes(named_tensors(model.diffusion_model).values())
    each = _WORKER_HOST_BYTES["cpu" if devices[0] == "cpu" else "gpu"]
    workers = 0 if running else each * len(devices)
    available = available_host_bytes()
    if weights + workers > available:
        raise RequestError(
            f"{len(devices)} parallel workers were asked, which takes {_gib(weights + workers)} of "
            f"host memory ({_gib(weights)} for weights, {_gib(workers)} for processes)",
            limit=f"{_gib(available)} are available",
            way_out="Close other programs, use fewer gpus, or a smaller file of the model (fp8)",
        )


def check_gpu_size(num_bytes: int, devices: Sequence[str]) -> None:
    """Refuse weights that are larger than a GPU; looks at its size only, so no context is made on it.

    Args:
        num_bytes: Weights of the fullest worker.
        devices: UUIDs of the GPUs, or "cpu".

    Raises:
        RequestError: Naming the GPU.
    """
    if devices[0] == "cpu":
        return
    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    sizes = {f"GPU-{found.uuid}": found.total_memory for found in properties}
    for device in devices:
        if num_bytes >= sizes.get(device, num_bytes + 1):
            raise _too_large(num_bytes, device, f"It has {_gib(sizes[device])} in all")


def check_gpu_room(num_bytes: int, free_bytes: Mapping[int, int | None], devices: Sequence[str]) -> None:
    """Refuse weights that some worker has no room for now.

    Args:
        num_bytes: Weights of the fullest worker.
        free_bytes: By rank, as the workers report it; None on the CPU.
        devices: Device of each rank.

    Raises:
        RequestError: Naming the GPU.
    """
    needed = num_bytes + comfy.model_management.minimum_inference_memory()
    for rank, free in free_bytes.items():
        if free is not None and needed > free:
            limit = f"{_gib(free)} are free there and {_gib(needed)} are needed with room to compute"
            raise _too_large(num_bytes, devices[rank], limit)


def _too_large(num_bytes: int, device: str, limit: str) -> RequestError:
    return RequestError(
        f"holding {_gib(num_bytes)} of weights on {device} was asked",
        limit=limit,
        way_out="Raise tensor_parallel_degree, use an fp8 file, or free that GPU",
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.1f} GiB"
