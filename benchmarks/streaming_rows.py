"""The ways of keeping a model within a budget that ``streaming.py`` compares; one runs in one process."""

from __future__ import annotations

import contextlib
import dataclasses
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from streaming_models import GIB, Clock, Sampling, Work, build, comfy_sampling, diffusers_sampling

# Left free beside the budget for what the computation itself takes, where a rival's cap is the free memory.
_ACTIVATION_BYTES = 3 * GIB
_WARM_UP_STEPS = 2

Result = dict[str, Any]


def measure(
    sample: Sampling, work: Work, clock: Clock, moved_bytes: Callable[[], int] | None = None
) -> Result:
    """Return the seconds of a step: the mean of one sampling, and the fastest and the slowest of it.

    Args:
        sample: The sampling.
        work: How many steps, and where.
        clock: What the sampling tells of its steps.
        moved_bytes: Returns the bytes copied to the GPU so far.
    """
    sample(_WARM_UP_STEPS)
    if not work.is_tiny:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    before = moved_bytes() if moved_bytes else 0
    clock.start()
    sample(work.steps)
    if not work.is_tiny:
        torch.cuda.synchronize()
    spans = clock.seconds()
    result: Result = {"seconds": sum(spans) / len(spans), "low": min(spans), "high": max(spans)}
    result["steps"] = work.steps
    result["spans"], result["launches"] = spans, clock.launch_seconds()
    if moved_bytes:
        result["moved_a_step"] = (moved_bytes() - before) / work.steps
    if not work.is_tiny:
        result["peak"] = torch.cuda.max_memory_allocated()
    return result


def measure_link(device: torch.device) -> float:
    """Return bytes a second of pinned copies of 256 MiB to the device, the best of 6."""
    is_cuda = device.type == "cuda"
    host = torch.zeros(256 * 2**20, dtype=torch.uint8, pin_memory=is_cuda)
    target = torch.empty_like(host, device=device)
    best = float("inf")
    for _ in range(6):
        if is_cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        target.copy_(host, non_blocking=True)
        if is_cuda:
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return host.numel() / best


def run_resident(work: Work) -> Iterator[Result]:
    """Measure the whole model on the GPU, and the link."""
    link = measure_link(work.device)
    patcher = build(work)
    weight_bytes = patcher.model_size()
    patcher.partially_load(work.device, 1e32)
    clock = Clock(work.device)
    found = measure(comfy_sampling(patcher, work, clock), work, clock)
    yield found | {"budget": 0, "link": link, "weight_bytes": weight_bytes}


def run_ferry(work: Work, *, caches_modulation: bool = True) -> Iterator[Result]:
    """Measure ``Offload Model``."""
    from comfyui_ferry.core.comfy_adapter import offload_model

    clock = Clock(work.device)
    patcher = offload_model(build(work), vram_gb=0, caches_modulation=caches_modulation)
    streamer = patcher.stream.streamer
    sample = comfy_sampling(patcher, work, clock)
    for budget in work.budgets:
        streamer.unload()
        streamer.pool.config = dataclasses.replace(streamer.pool.config, vram_limit_bytes=budget)
        patcher.partially_load(work.device, budget)
        found = measure(sample, work, clock, lambda: streamer.stats().moved_bytes)
        stats = streamer.stats()
        yield found | {
            "budget": budget,
            "weights_held": stats.target_bytes,
            "blocks": [stats.num_resident, stats.num_streamed],
            "stall": stats.stall_share,
        }


def run_comfyui(work: Work) -> Iterator[Result]:
    """Measure ComfyUI's low-VRAM loading, told to load as many bytes as the budget."""
    clock = Clock(work.device)
    patcher = build(work)
    sample = comfy_sampling(patcher, work, clock)
    for budget in work.budgets:
        patcher.detach()
        patcher.partially_load(work.device, budget)
        yield measure(sample, work, clock) | {"budget": budget}


def run_dynamic(work: Work) -> Iterator[Result]:
    """Measure ComfyUI's dynamic VRAM on a card whose other memory another process holds."""
    import comfy.model_management

    (budget,) = work.budgets
    patcher = build(work, is_dynamic=True)
    clock = Clock(work.device)
    sample = comfy_sampling(patcher, work, clock)
    torch.zeros(1, device=work.device)
    with contextlib.nullcontext(0) if work.is_tiny else ballast(budget + _ACTIVATION_BYTES) as free_at_start:
        comfy.model_management.load_models_gpu([patcher])
        found = measure(sample, work, clock)
        if not work.is_tiny:
            # Not in torch's figures: dynamic VRAM maps its own.
            found["peak"] = free_at_start - torch.cuda.mem_get_info()[0]
    yield found | {"budget": budget}


_BALLAST = """
import sys, torch
free, _ = torch.cuda.mem_get_info(0)
kept = torch.empty(max(0, free - int(sys.argv[1])), dtype=torch.uint8, device="cuda")
print("held", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def ballast(left_free_bytes: int) -> Iterator[int]:
    """Let another process hold the GPU's memory but for ``left_free_bytes``; yields what is free then."""
    command = [sys.executable, "-c", _BALLAST, str(left_free_bytes)]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdin is not None and holder.stdout is not None
    try:
        if holder.stdout.readline().strip() != "held":
            raise RuntimeError("the rest of the GPU's memory could not be taken")
        yield torch.cuda.mem_get_info()[0]
    finally:
        holder.stdin.close()
        holder.wait()


def run_diffusers(work: Work) -> Iterator[Result]:
    """Measure diffusers' group offloading."""
    clock = Clock(work.device)
    yield measure(diffusers_sampling(work, clock), work, clock) | {"budget": 0}


WAYS: dict[str, Callable[[Work], Iterator[Result]]] = {
    "resident": run_resident,
    "ferry": run_ferry,
    "ferry without modulation cache": lambda work: run_ferry(work, caches_modulation=False),
    "comfyui lowvram": run_comfyui,
    "comfyui async": run_comfyui,
    "comfyui dynamic": run_dynamic,
    "diffusers group": run_diffusers,
}
