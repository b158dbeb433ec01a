"""Faults of a rank at every phase of a pool's life, and what must be told of them and left behind."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch
from comfyui_ferry.core.errors import WorkerError
from comfyui_ferry.core.workers import Deadlines, SharedArena, WorkerPool
from ferry_support.worker_specs import exists, open_files, pids

LIMIT_S = 5.0
# The default is 2.5 s; less here keeps the suite short.
SHORT = Deadlines(start_s=60, call_s=60, collective_s=60, stall_s=0.6, overdue_s=0.5,
                  heartbeat_s=30, close_s=1.0)  # fmt: skip
TOLD = {
    "kill": "worker rank 1 was killed by SIGKILL",
    "stop": "worker rank 1 was stopped by a signal (SIGSTOP)",
    "stall": "worker rank 1 was idle",
    "native": "worker rank 1 was idle",
    "loop": "does not end: worker rank",  # with NCCL the others compute, too, while they wait
    "raise": "worker rank 1 raised KeyError: 'a planted error'",
    "oom": "worker rank 1 raised RuntimeError",
    "gpu-oom": "worker rank 1 raised torch.OutOfMemoryError",
}
ON_CPU = [kind for kind in TOLD if kind != "gpu-oom"]
# What the rank was doing, from its own traceback or from the stack that it was made to write.
TRACED = {"kill": "", "stop": "in ", "stall": "in planted_stall", "native": "in commit_fault",
          "loop": "in planted_loop", "raise": "in commit_fault", "oom": "in planted_allocation",
          "gpu-oom": "in commit_fault"}  # fmt: skip
_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


def leftovers() -> dict[str, int]:
    """Descriptors, shared memory and processes (zombies too) of this process."""
    files = open_files()
    maps = Path("/proc/self/maps").read_text()
    stats = [Path("/proc", name, "stat") for name in os.listdir("/proc") if name.isdigit()]
    parents = [_parent(stat) for stat in stats]
    return {
        "files": len(files),
        "shared files": sum("memfd:ferry" in file for file in files),
        "mappings": maps.count("memfd:ferry"),
        "processes": parents.count(os.getpid()),
    }


def _parent(stat: Path) -> int:
    try:
        return int(stat.read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return -1


def assert_found(begin: float, error: BaseException, kind: str, processes: list[int]) -> float:
    """Check what was told and how soon after the fault; return the seconds."""
    text = str(error)
    planted = re.findall(r"a fault is planted at (\d+\.\d+)", text)
    # The first time: a signal that asks for stacks may wake it up, to fail once more.
    seconds = time.monotonic() - (float(planted[0]) if planted else begin)
    assert seconds < LIMIT_S, text
    assert not any(exists(pid) for pid in processes)
    print(f"{seconds:.1f} s: {text.splitlines()[0]}")  # what docs/reliability.md lists
    assert TOLD[kind] in text.splitlines()[0], text
    assert TRACED[kind] in text.partition("--- rank 1")[2], text
    return seconds


def fault_in_a_call(pool: WorkerPool, phase: str, kind: str) -> float:
    """Have rank 1 fail while it loads, in its first call, in mid call or between two calls."""
    payload = {"rank": 1, "kind": kind, "after": 1}
    if phase == "load":
        payload["arena"] = SharedArena.create({"w": torch.ones(1 << 20)}).handle()
    if phase in ("between", "mid"):
        pool.call("meet", {"before": 2})
    if phase == "mid":
        payload["before"] = 3
    # A loop is told by comparison: with the same call before, or with the other ranks.
    alone = kind == "loop" and phase == "mid"
    for _ in range(3 * alone):
        pool.call("meet", {"before": 1}, alike="meet")
    processes = pids(pool)
    begin = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        if phase == "between":
            os.kill(processes[1], _SIGNALS[kind])
            payload = {"after": 1}
        pool.call("meet", payload, alike="meet", same_work=not alone)
    del payload
    return assert_found(begin, caught.value, kind, processes)


def fault_at_the_end(pool: WorkerPool, kind: str) -> float:
    """Close a pool one rank of which does not answer; return how long that took."""
    processes = pids(pool)
    if kind in _SIGNALS:
        os.kill(processes[1], _SIGNALS[kind])
    else:
        pool.submit("meet", {"rank": 1, "kind": kind})
        time.sleep(0.1)
    begin = time.monotonic()
    pool.close()
    seconds = time.monotonic() - begin
    print(f"{seconds:.1f} s: closed")
    assert seconds < LIMIT_S
    assert not any(exists(pid) for pid in processes)
    return seconds
