"""Specs of small CPU pools for tests, and what they leave behind."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from comfyui_ferry.core.workers import Deadlines, WorkerSpec

SUPPORT = Path(__file__).resolve().parent


def cpu_spec(num_ranks: int = 2, **changes) -> WorkerSpec:
    """A gloo pool that offers the jobs of `worker_jobs`."""
    options = {
        "devices": ("cpu",) * num_ranks,
        "setup": "ferry_support.worker_jobs",
        "backend": "gloo",
        "import_roots": {"ferry_support": str(SUPPORT)},
        "num_threads": 1,
        "deadlines": Deadlines(start_s=60, call_s=30, collective_s=30),
    }
    return WorkerSpec(**(options | changes))


def pids(pool) -> list[int]:
    return [rank.process.pid for rank in pool._group.ranks]


def exists(pid: int) -> bool:
    """Whether the process exists; a zombie does."""
    return os.path.exists(f"/proc/{pid}")


def wait_until_gone(processes: Iterable[int], timeout_s: float) -> list[int]:
    """Return the processes that still exist after `timeout_s`."""
    until = time.monotonic() + timeout_s
    while (left := [pid for pid in processes if exists(pid)]) and time.monotonic() < until:
        time.sleep(0.05)
    return left


def open_files() -> list[str]:
    """What this process has open, but for what is being read just now by some thread."""
    gc.collect()
    links = []
    for name in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:
            pass
    return sorted(link for link in links if not link.startswith("/proc/"))


def grown(
    count: Callable[[], dict[str, int]], before: dict[str, int], within_s: float = 5.0
) -> dict[str, int]:
    """Return what `count` still has more of than `before` after a while, by how much.

    Other threads (a pool's reader, the watchdog) close what they had open a moment later.
    """
    until = time.monotonic() + within_s
    while more := {name: n - before.get(name, 0) for name, n in count().items() if n > before.get(name, 0)}:
        if time.monotonic() > until:
            return more
        time.sleep(0.05)
    return {}
