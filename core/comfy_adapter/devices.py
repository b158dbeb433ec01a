"""Which devices workers may use, seen from ComfyUI's process.

On a machine without a GPU (ComfyUI started with ``--cpu``) workers are CPU processes. That is slow
and meant for trying a workflow and for tests; the same code paths run, with gloo instead of NCCL.
"""

from __future__ import annotations

import os
from typing import Any

import comfy.cli_args
import torch

from ..errors import RequestError
from ..workers import check_address
from .user_settings import chosen_gpus

_MIN_CPU_WORKERS = 8


def worker_devices(num_gpus: int) -> tuple[str, ...]:
    """Return the devices of ranks ``0 .. num_gpus - 1``: GPU UUIDs, or ``"cpu"`` for each.

    UUIDs, because ComfyUI rewrites ``CUDA_VISIBLE_DEVICES`` at start, so an index would mean another
    GPU in a child process. Which ones they are is a setting (``user_settings``).

    Raises:
        RequestError: If the number is zero, negative, or more than may be used.
    """
    available = _available_devices()
    chosen = chosen_gpus(len(available))
    if 1 <= num_gpus <= len(chosen):
        return tuple(available[index] for index in chosen[:num_gpus])
    what = "CPU workers (no GPU is in use)" if available[0] == "cpu" else "GPUs that this ComfyUI can see"
    limit = f"There are {len(available)} {what}"
    way_out = f"Set gpus to a number from 1 to {len(chosen)}"
    if len(chosen) < len(available):
        limit = f"Of {len(available)} {what}, Settings > Ferry allows {len(chosen)}: {_listed(chosen)}"
        way_out += ", or allow more there"
    raise RequestError(f"gpus={num_gpus} was asked", limit=limit, way_out=way_out)


def cluster_devices(num_gpus: int, ray_address: str) -> tuple[str, ...]:
    """Return stand-ins for the devices of a cluster's ranks; which ones they are, Ray decides.

    Raises:
        RequestError: If the number is below 1, the address is none, or Ray is not installed.
    """
    if not isinstance(ray_address, str):
        raise RequestError(
            f"ray_address={ray_address!r} was asked",
            limit="It is text: host:port, or auto",
            way_out="Type it, or connect a STRING",
        )
    if num_gpus < 1:
        raise RequestError(
            f"gpus={num_gpus} was asked", limit="A cluster runs 1 or more", way_out="Set gpus to 1 or more"
        )
    check_address(ray_address)
    on_cpu = comfy.cli_args.args.cpu
    return tuple("cpu" if on_cpu else f"cluster GPU {rank}" for rank in range(num_gpus))


def describe_devices() -> dict[str, Any]:
    """Return ``{"kind": "cpu" | "cuda", "devices": [{"index", "name", "memory_bytes"}], "chosen": [index]}``.

    Raises:
        RequestError: If there are none, or the setting that chooses them is wrong.
    """
    available = _available_devices()
    on_cpu = available[0] == "cpu"
    devices = [
        {"index": index, "name": f"CPU worker {index}", "memory_bytes": None} if on_cpu else _gpu(index)
        for index in range(len(available))
    ]
    return {
        "kind": "cpu" if on_cpu else "cuda",
        "devices": devices,
        "chosen": chosen_gpus(len(available)),
    }


def device_index(device: str, rank: int) -> int:
    """Return the index by which people know the device of a rank; on the CPU or a cluster the rank."""
    if not device.startswith("GPU-"):
        return rank
    available = _available_devices()
    return available.index(device) if device in available else rank


def _gpu(index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    return {"index": index, "name": properties.name, "memory_bytes": properties.total_memory}


def _listed(indices: list[int]) -> str:
    return ", ".join(map(str, indices))


def helper_devices(gpus: int, *, first: torch.device) -> tuple[str, ...]:
    """Return the devices of ``gpus`` without ``first``, which this process computes on itself.

    Raises:
        RequestError: If there are not so many that may be used.
    """
    worker_devices(gpus)
    if first.type != "cuda":
        return ("cpu",) * (gpus - 1)
    own = f"GPU-{torch.cuda.get_device_properties(first).uuid}"
    available = _available_devices()
    usable = (available[index] for index in chosen_gpus(len(available)))
    return tuple(device for device in usable if device != own)[: gpus - 1]


def check_gpus(gpus: int) -> None:
    """Refuse a number of GPUs that this machine does not have.

    Raises:
        RequestError: With what it has.
    """
    if not isinstance(gpus, int) or isinstance(gpus, bool):
        raise RequestError(
            f"gpus={gpus!r} was asked",
            limit="It is a number of GPUs, so a whole number",
            way_out="Type a number, or connect an INT",
        )
    worker_devices(gpus)


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
