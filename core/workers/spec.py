"""What a pool is asked to be, checked before any process starts."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ..errors import RequestError

PACK_ALIAS = "comfyui_ferry"
PACK_ROOT = Path(__file__).resolve().parents[2]
_BACKENDS = ("gloo", "nccl")
_GPU_NAME = re.compile(r"(GPU|MIG)-[0-9A-Za-z/-]+")
# Set by the launcher for every worker; a request for another value could not be honoured.
_RESERVED = frozenset({"CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "COMFYUI_FERRY_RANK"})


@dataclass(frozen=True)
class Deadlines:
    """How long a pool waits, in seconds, before it calls a worker lost.

    Attributes:
        start_s: From the first process to the last "ready": imports, rendezvous, set-up.
        call_s: From submitting a call to its last reply, unless the call names its own.
        collective_s: One collective between workers.
        stall_s: A worker that is stopped, or that does nothing at all although a call waits for it.
        overdue_s: A worker that computes for this much processor time more than a few times what the same
            call took before (``submit``'s ``alike``), or other ranks (``same_work``); an endless loop, for
            example.
        heartbeat_s: A worker that computes but runs no Python thread, because native code keeps the
            interpreter's lock.
        close_s: An orderly exit, before the process is killed.

    Raises:
        RequestError: If one is not a positive, finite number.
    """

    start_s: float = 120.0
    call_s: float = 600.0
    collective_s: float = 300.0
    stall_s: float = 2.5
    overdue_s: float = 2.5
    heartbeat_s: float = 15.0
    close_s: float = 3.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 < value < math.inf:
                raise RequestError(
                    f"{name}={value} was asked",
                    limit="A deadline is a finite number of seconds above 0",
                    way_out="Give the longest time that is not yet a fault",
                )


@dataclass(frozen=True)
class RankSpan:
    """Where a pool's ranks stand among all that compute together, if others run on other machines.

    Attributes:
        first_rank: Number of the pool's first rank; its others follow.
        world_size: Number of all ranks.
        store: ``host:port`` of the ``torch.distributed.TCPStore`` in which they meet.
    """

    first_rank: int
    world_size: int
    store: str


@dataclass(frozen=True)
class WorkerSpec:
    """The workers of one pool.

    Attributes:
        devices: Device of each rank; their number is the number of ranks. "cpu", or the UUID of a
            GPU ("GPU-..." or "MIG-..."), or its index as this process' torch counts.
        setup: Dotted path, inside the pack, of the module that registers the jobs. Each worker
            imports it and calls ``register(context, **setup_args)``, which returns the jobs as a dict
            of functions by name. Arguments and results of a job are what ``protocol`` can write.
        backend: torch.distributed backend, "gloo" or "nccl".
        setup_args: Keyword arguments of ``register``.
        environment: Extra environment variables of the workers.
        import_paths: Folders put first on the workers' ``sys.path``, in this order.
        import_roots: Packages by name and folder that ``setup`` may lie in besides the pack; they are
            loaded from exactly that folder, as the pack is.
        num_threads: CPU threads of each worker; None divides the machine's cores evenly.
        deadlines: How long to wait for what.
        span: Given if the pool is a part of a larger one; None: it is all there is.

    Raises:
        RequestError: If a value is impossible whatever the machine.
    """

    devices: tuple[str | int, ...]
    setup: str
    _: KW_ONLY
    backend: str
    setup_args: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    environment: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    import_paths: tuple[str, ...] = ()
    import_roots: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    num_threads: int | None = None
    deadlines: Deadlines = field(default_factory=Deadlines)
    span: RankSpan | None = None

    def __post_init__(self) -> None:
        self._check_devices()
        self._check_environment()
        if not _module_file(self.setup, self.import_roots):
            raise RequestError(
                f"setup={self.setup!r} was asked",
                limit=f"There is no such module in the pack or in {sorted(self.import_roots)}",
                way_out="Name a module by its dotted path from the pack's root",
            )
        if self.num_threads is not None and self.num_threads < 1:
            raise RequestError(
                f"num_threads={self.num_threads} was asked",
                limit="A worker needs at least 1 thread",
                way_out="Give a number from 1 on, or None",
            )

    @property
    def num_ranks(self) -> int:
        """Number of worker processes."""
        return len(self.devices)

    @property
    def ranks(self) -> range:
        """Their ranks."""
        first = 0 if self.span is None else self.span.first_rank
        return range(first, first + self.num_ranks)

    @property
    def world_size(self) -> int:
        """Number of ranks that compute together, those of other pools included."""
        return self.num_ranks if self.span is None else self.span.world_size

    @property
    def on_gpu(self) -> bool:
        """Whether the ranks compute on GPUs."""
        return self.devices[0] != "cpu"

    @property
    def setup_module(self) -> str:
        """The absolute name under which a worker imports ``setup``."""
        inside_root = self.setup.split(".")[0] in self.import_roots
        return self.setup if inside_root else f"{PACK_ALIAS}.{self.setup}"

    def threads_per_rank(self) -> int:
        """Return the number of CPU threads that each worker gets."""
        if self.num_threads is not None:
            return self.num_threads
        return max(1, len(os.sched_getaffinity(0)) // self.num_ranks)

    def _check_devices(self) -> None:
        if not self.devices:
            raise RequestError("0 workers were asked", limit="A pool has at least 1", way_out="Name a device")
        if self.backend not in _BACKENDS:
            raise RequestError(
                f"backend={self.backend!r} was asked",
                limit=f"The backends are {', '.join(_BACKENDS)}",
                way_out="Use gloo for CPU workers and nccl for GPUs",
            )
        on_cpu = [device == "cpu" for device in self.devices]
        if any(on_cpu) and not all(on_cpu):
            raise RequestError(
                f"devices={list(self.devices)} was asked",
                limit="CPU and GPU workers cannot be mixed in one pool",
                way_out='Use only GPUs, or only "cpu"',
            )
        if self.backend == "nccl" and (on_cpu[0] or len(set(self.devices)) < len(self.devices)):
            raise RequestError(
                f"backend='nccl' was asked with devices={list(self.devices)}",
                limit="NCCL needs a different GPU for every rank",
                way_out="Name each GPU once, or use backend='gloo'",
            )

    def _check_environment(self) -> None:
        reserved = sorted(_RESERVED & set(self.environment))
        if reserved:
            raise RequestError(
                f"environment sets {', '.join(reserved)}",
                limit="The launcher sets these itself",
                way_out="Use devices and num_threads",
            )
        if not sys.executable:
            raise RequestError(
                "worker processes were asked",
                limit="This Python does not know its own executable (sys.executable is empty)",
                way_out="Run ComfyUI with a normal Python interpreter",
            )


def visible_device(device: str | int) -> str:
    """Return the value of ``CUDA_VISIBLE_DEVICES`` that shows a worker exactly this device.

    An index is turned into the GPU's UUID: ComfyUI rewrites ``CUDA_VISIBLE_DEVICES`` at its start, so the
    same index would mean another GPU in a child process.

    Raises:
        RequestError: If the device does not exist.
    """
    if device == "cpu":
        return ""
    if isinstance(device, str) and _GPU_NAME.fullmatch(device):
        return device
    import torch

    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if isinstance(device, int) and 0 <= device < available:
        return f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    raise RequestError(
        f"a worker on device {device!r} was asked",
        limit=f"torch sees {available} GPUs in this process",
        way_out='Use "cpu", an index below that number, or the UUID that nvidia-smi -L prints',
    )


def _module_file(dotted: str, roots: Mapping[str, str]) -> Path | None:
    parts = dotted.split(".")
    if not all(part.isidentifier() for part in parts):
        return None
    inside_root = parts[0] in roots
    path = Path(roots[parts[0]], *parts[1:]) if inside_root else PACK_ROOT.joinpath(*parts)
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)
