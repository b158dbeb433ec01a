"""How fast the machine's GPUs are, for the planner: products and attention are timed.

The links are measured once, before workers are first started on a set of GPUs; until then a figure by the
boards' name stands in.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence

import comfy.model_management
import torch

from ..parallel import Machine
from ..workers import known_links
from .devices import worker_devices

# One direction, as usually reached in all-to-all: NVLink of data centre GPUs; PCIe 4 x16 from GPU to GPU;
# the same by way of host memory.
_NVLINK_BYTES_PER_S = 300e9
_PEER_BYTES_PER_S = 20e9
_HOST_BYTES_PER_S = 7e9
_NVLINK_BOARDS = ("V100-SXM", "A100-SXM", "A800-SXM", "H100 80GB HBM3", "H800", "H20", "B200", "B300")
# Eager PyTorch with ComfyUI's layers, a current server or desktop processor.
_LAUNCH_S = 8e-6
_WAIT_S = {"cuda": 50e-6, "cpu": 200e-6}


def describe_machine(gpus: int) -> Machine:
    """Return what ``gpus`` of this machine's devices can do; the first call takes part of a second.

    GPUs are taken to be alike: the current one is timed.

    Raises:
        RequestError: If there are not that many.
    """
    devices = worker_devices(gpus)
    device = comfy.model_management.get_torch_device()
    linear, attention = _measured_flops(device)
    return Machine(
        gpus=gpus,
        memory_bytes=comfy.model_management.get_total_memory(device),
        linear_flops_per_s=linear,
        attention_flops_per_s=attention,
        link_bytes_per_s=_link_bytes_per_s(devices) if device.type == "cuda" else _HOST_BYTES_PER_S,
        collective_s=_WAIT_S.get(device.type, _WAIT_S["cuda"]),
        launch_s=_LAUNCH_S,
    )


@functools.cache
def _measured_flops(device: torch.device) -> tuple[float, float]:
    """Return operations a second of matrix products and of attention."""
    size, tokens, dtype = (8192, 8192, torch.bfloat16) if device.type == "cuda" else (512, 512, torch.float32)
    matrix = torch.randn(size, size, device=device, dtype=dtype)
    heads = torch.randn(1, 16, tokens, 128, device=device, dtype=dtype)
    attend = torch.nn.functional.scaled_dot_product_attention
    return (
        2 * size**3 / _seconds(lambda: matrix @ matrix, device),
        4 * tokens**2 * 16 * 128 / _seconds(lambda: attend(heads, heads, heads), device),
    )


def _seconds(function: Callable[[], torch.Tensor], device: torch.device) -> float:
    """Return the shortest of a few runs, after one to warm up."""

    def timed() -> float:
        start = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    timed()
    return min(timed() for _ in range(4))


def _link_bytes_per_s(devices: Sequence[str]) -> float:
    """Return what the slowest pair of GPUs reached when it was measured, else what boards like it reach."""
    if len(devices) == 1:
        return _NVLINK_BYTES_PER_S
    found = known_links(devices)
    if found is not None and found["links"]:
        return min(link["bytes_per_s"] for link in found["links"])
    if not torch.cuda.can_device_access_peer(0, 1):
        return _HOST_BYTES_PER_S
    # Peer access over NVLink is what data centre boards have; other boards with peer access use PCIe.
    name = torch.cuda.get_device_properties(0).name
    return _NVLINK_BYTES_PER_S if any(part in name for part in _NVLINK_BOARDS) else _PEER_BYTES_PER_S
