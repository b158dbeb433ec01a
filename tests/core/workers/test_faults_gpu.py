"""The faults of `test_faults.py` on two GPUs over NCCL, several groups at once:

FERRY_TEST_DEVICE=cuda .venv/bin/python -m pytest -s -m multigpu tests/core/workers/
"""

from __future__ import annotations

import os
import time
import traceback
from concurrent.futures import ThreadPoolExecutor

import pytest
from comfyui_ferry.core.errors import WorkerError
from comfyui_ferry.core.workers import Deadlines, SharedArena, WorkerPool
from ferry_support.worker_faults import (
    TOLD,
    assert_found,
    fault_at_the_end,
    fault_in_a_call,
    leftovers,
)
from ferry_support.worker_specs import cpu_spec, grown, pids

# Each group is three processes with much to import.
AT_ONCE = max(2, min(8, len(os.sched_getaffinity(0)) // 4))
# The default limit for doing nothing: NCCL's first collective may wait a while for the other rank.
DEADLINES = Deadlines(start_s=120, call_s=60, collective_s=60)
STARTS = [("start", kind) for kind in ("kill", "stop", "stall", "native", "raise", "oom")]
CALLS = [(phase, kind) for phase in ("load", "first", "mid") for kind in TOLD]
OTHERS = [("between", "kill"), ("between", "stop"), ("end", "kill"), ("end", "stop"), ("end", "stall"),
          ("end", "native"), ("end", "loop"),
          ("cancel", "start"), ("cancel", "load"), ("cancel", "mid")]  # fmt: skip


class Cancel(BaseException):
    pass


def spec(**changes):
    return cpu_spec(2, devices=(0, 1), backend="nccl", deadlines=DEADLINES, **changes)


def fault_at_the_start(kind: str) -> float:
    with pytest.raises(WorkerError) as caught:
        WorkerPool.start(spec(setup_args={"fail_on": 1, "way": kind}))
    return assert_found(0.0, caught.value, kind, [])


def cancel(phase: str) -> float:
    """Cancel the second time that somebody asks; return how long the caller was kept."""
    asked: list[float] = []

    def poll():
        asked.append(time.monotonic())
        if len(asked) == 2:
            raise Cancel

    if phase == "start":
        with pytest.raises(Cancel):
            WorkerPool.start(spec(), poll=poll)
        return time.monotonic() - asked[-1]
    with WorkerPool.start(spec()) as pool:
        processes = pids(pool)
        arena = SharedArena.create({"w": pool.call("meet", {"before": 1})[0]})
        with pytest.raises(Cancel):
            pool.call("compute", {"seconds": 0.5} | ({"rank": 1} if phase == "mid" else {}), poll=poll)
        seconds = time.monotonic() - asked[-1]
        assert pool.call("meet", {"before": 1, "arena": arena.handle()})[1].tolist() == [2]
        assert pids(pool) == processes
    return seconds


def run_case(phase: str, kind: str) -> str:
    """Return what happened, in a line, or a traceback."""
    try:
        if phase == "start":
            seconds = fault_at_the_start(kind)
        elif phase == "cancel":
            seconds = cancel(kind)
        elif phase == "end":
            seconds = fault_at_the_end(WorkerPool.start(spec()), kind)
        else:
            with WorkerPool.start(spec()) as pool:
                if phase != "first":
                    pool.call("meet", {"before": 1})
                seconds = fault_in_a_call(pool, phase, kind)
    except BaseException:  # a thread's: told by the test
        return f"{phase:8} {kind:8} FAILED\n{traceback.format_exc()}"
    return f"{phase:8} {kind:8} {seconds:4.1f} s"


@pytest.mark.multigpu
@pytest.mark.timeout(300)
def test_every_fault_on_gpus():
    with WorkerPool.start(spec()) as pool:  # whatever is opened once and kept
        pool.call("meet", {"before": 1})
    before = leftovers()
    with ThreadPoolExecutor(AT_ONCE) as threads:
        lines = list(threads.map(lambda case: run_case(*case), [*STARTS, *CALLS, *OTHERS]))
    print("\n".join(["", *lines]))
    assert not [line for line in lines if "FAILED" in line]
    assert grown(leftovers, before) == {}
    with WorkerPool.start(spec()) as pool:
        assert pool.call("meet", {"before": 1})[0].tolist() == [2]
        assert os.getpid() not in pids(pool)
