"""Start worker processes inside ComfyUI's code base, and tell the browser."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path

import comfy
import comfy.model_management

from ..errors import WorkerError
from ..log import get_logger
from ..parallel import ParallelDims
from ..workers import WorkerPool, WorkerSpec
from .model_export import comfyui_arguments
from .worker_notices import WorkerNotice, loss_notice

_log = get_logger("workers")


def start_pool(dims: ParallelDims, devices: tuple[str, ...], *, again: bool) -> WorkerPool:
    """Start one worker a device, or none; Cancel ends the start.

    Args:
        dims: Their degrees.
        devices: Their devices.
        again: Whether others were lost before.

    Raises:
        WorkerError: If a worker does not start; then none is left running.
    """
    _log.info("starting %d workers on %s", len(devices), ", ".join(devices))
    WorkerNotice("starting", len(devices)).send()
    start_s = time.monotonic()
    try:
        pool = WorkerPool.start(_spec(dims, devices), poll=check_interrupt)
    except WorkerError as error:
        loss_notice(str(error), len(devices)).send()
        raise
    kind = "restarted" if again else "started"
    WorkerNotice(kind, len(devices), seconds=time.monotonic() - start_s).send()
    return pool


def check_interrupt() -> None:
    """Raise ComfyUI's exception if the user pressed Cancel."""
    comfy.model_management.throw_exception_if_processing_interrupted()


def _spec(dims: ParallelDims, devices: tuple[str, ...]) -> WorkerSpec:
    comfyui_root = Path(next(iter(comfy.__path__))).resolve().parent
    return WorkerSpec(
        devices=devices,
        backend="gloo" if devices[0] == "cpu" else "nccl",
        setup="core.comfy_adapter.jobs",
        setup_args={"arguments": comfyui_arguments(), "dims": asdict(dims)},
        import_paths=(str(comfyui_root),),
    )
