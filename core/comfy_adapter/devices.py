"""Which devices workers may use, seen from ComfyUI's process.

On a machine without a GPU (ComfyUI started with ``--cpu``) workers are CPU processes. That is slow
and meant for trying a workflow and for tests; the same code paths run, with gloo instead of NCCL.
"""

from __future__ import annotations

import os

import comfy.cli_args
import torch

from ..errors import RequestError

_MIN_CPU_WORKERS = 8


def worker_devices(num_gpus: int) -> tuple[str, ...]:
    """Return the devices of ranks ``0 .. num_gpus - 1``: GPU UUIDs, or ``"cpu"`` for each.

    UUIDs, because ComfyUI rewrites ``CUDA_VISIBLE_DEVICES`` at start, so an index would mean another
    GPU in a child process.

    Raises:
        RequestError: If the number is zero, negative, or more than the machine has.
    """
    available = _available_devices()
    if 1 <= num_gpus <= len(available):
        return available[:num_gpus]
    what = "CPU workers (no GPU is in use)" if available[0] == "cpu" else "GPUs that this ComfyUI can see"
    raise RequestError(
        f"gpus={num_gpus} was asked",
        limit=f"There are {len(available)} {what}",
        way_out=f"Set gpus to a number from 1 to {len(available)}",
    )


def _available_devices() -> tuple[str, ...]:
    if comfy.cli_args.args.cpu:
        return ("cpu",) * max(_MIN_CPU_WORKERS, os.cpu_count() or 1)
    if not torch.cuda.is_available():
        raise RequestError(
            "parallel sampling was asked",
            limit="Workers run on CUDA GPUs, and torch sees none on this machine",
            way_out="Use a machine with CUDA GPUs, or start ComfyUI with --cpu to try a workflow slowly",
        )
    indices = range(torch.cuda.device_count())
    return tuple(f"GPU-{torch.cuda.get_device_properties(index).uuid}" for index in indices)
