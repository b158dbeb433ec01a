"""Whether a model and its workers fit the host, and how large the GPUs are; asked before anything starts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ..errors import RequestError
from ..workers import available_host_bytes, file_backed_bytes
from .model_export import named_tensors

# What a worker takes of the host besides weights: Python, ComfyUI's modules, CUDA's own tables.
_WORKER_HOST_BYTES = {"cpu": 300 << 20, "gpu": 1 << 30}


def check_host(module: nn.Module, devices: Sequence[str], *, shared: bool, running: bool) -> None:
    """Refuse a module whose weights, or workers, the host has no memory for.

    Args:
        module: The module.
        devices: Device of each worker.
        shared: Whether its weights are in shared memory already.
        running: Whether the workers are there already.

    Raises:
        RequestError: With what is needed and what is left.
    """
    # Weights in ordinary memory move; only those that are still mapped from their file take more.
    weights = 0 if shared else file_backed_bytes(named_tensors(module).values())
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


def gpu_sizes(devices: Sequence[str]) -> dict[int, int | None]:
    """Return the memory of each rank's GPU in all, None on the CPU; no context is made on a GPU.

    Args:
        devices: UUIDs of the GPUs, or "cpu".
    """
    if devices[0] == "cpu":
        return dict.fromkeys(range(len(devices)), None)
    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    sizes = {f"GPU-{found.uuid}": found.total_memory for found in properties}
    return {rank: sizes.get(device) for rank, device in enumerate(devices)}


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.1f} GiB"
