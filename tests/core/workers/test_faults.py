"""Every kind of fault at every phase of a pool's life: found within 5 s, told apart, nothing left.

Real processes; on the CPU they are forked (see `ferry_support.forked_workers`), so that trying one takes
tenths of a second. All of it (the same on two GPUs over NCCL is in `test_faults_gpu.py`):

    .venv/bin/python -m pytest -m "slow or not slow" tests/core/workers/test_faults.py
"""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import replace

import pytest
import torch
from comfyui_ferry.core.errors import WorkerError
from comfyui_ferry.core.workers import SharedArena, WorkerPool
from comfyui_ferry.core.workers.activity import Activity, ProcessActivity
from comfyui_ferry.core.workers.watchdog import Watchdog
from ferry_support import forked_workers
from ferry_support.worker_faults import (
    LIMIT_S,
    ON_CPU,
    SHORT,
    assert_found,
    fault_at_the_end,
    fault_in_a_call,
    leftovers,
)
from ferry_support.worker_specs import cpu_spec, grown, pids, wait_until_gone


@pytest.fixture
def forked(monkeypatch):
    forked_workers.install(monkeypatch)


def spec(**changes):
    return cpu_spec(2, **{"deadlines": SHORT, **changes})


IN_CALLS = [(phase, kind) for phase in ("load", "first", "mid") for kind in ON_CPU]
BETWEEN = [("between", "kill"), ("between", "stop")]
# Each kind and each phase at least once; the whole table is for `-m slow`.
QUICK = {("load", "oom"), ("load", "native"), ("first", "loop"), ("first", "stop"), ("mid", "kill"),
         ("mid", "loop"), ("mid", "stall"), ("mid", "raise"), ("between", "stop")}  # fmt: skip


def case(phase: str, kind: str):
    return pytest.param(phase, kind, marks=[] if (phase, kind) in QUICK else [pytest.mark.slow])


@pytest.mark.parametrize(("phase", "kind"), [case(*pair) for pair in [*IN_CALLS, *BETWEEN]])
def test_a_fault_in_a_call(forked, phase, kind):
    before = leftovers()
    with WorkerPool.start(spec()) as pool:
        fault_in_a_call(pool, phase, kind)
    with WorkerPool.start(spec()) as pool:  # the next one works
        assert pool.call("meet", {"before": 1})[0].tolist() == [2]
    del pool
    assert grown(leftovers, before) == {}


@pytest.mark.parametrize(
    "kind",
    [
        "oom",
        "loop",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ON_CPU if kind not in ("oom", "loop")),
    ],
)
def test_a_fault_at_the_start(forked, kind, monkeypatch):
    before, processes = leftovers(), []
    original = WorkerPool.__init__

    def remember(self, spec, group):
        processes.extend(rank.process.pid for rank in group.ranks)
        original(self, spec, group)

    monkeypatch.setattr(WorkerPool, "__init__", remember)
    begin = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        WorkerPool.start(spec(setup_args={"fail_on": 1, "way": kind}))
    assert_found(begin, caught.value, kind, processes)
    assert grown(leftovers, before) == {}


@pytest.mark.parametrize(
    "kind",
    ["kill", "stop", "stall", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("native", "loop"))],
)
def test_a_fault_at_the_end(forked, kind):
    """Closing takes no longer because a rank does not answer."""
    before = leftovers()
    pool = WorkerPool.start(spec())
    fault_at_the_end(pool, kind)
    del pool
    assert grown(leftovers, before) == {}


def test_a_loop_while_others_keep_a_core_busy_in_a_collective(forked):
    """As NCCL does while it makes its connections, in the first collective of a group."""
    with WorkerPool.start(spec()) as pool:
        begin, processes = time.monotonic(), pids(pool)
        with pytest.raises(WorkerError) as caught:
            pool.call("loop_while_others_make_connections", same_work=True)
        assert "does not end: worker rank 1 was computing" in str(caught.value)
        assert_found(begin, caught.value, "loop", processes)


def test_a_call_to_a_rank_that_has_just_died_says_how(forked, monkeypatch):
    """Though nobody has seen it yet when the call is sent."""
    take = Watchdog._take_replies
    with WorkerPool.start(spec()) as pool:
        slow = lambda self, timeout_s: time.sleep(0.5) or take(self, timeout_s)  # noqa: E731
        monkeypatch.setattr(Watchdog, "_take_replies", slow)
        time.sleep(0.3)
        os.kill(pids(pool)[1], signal.SIGKILL)
        time.sleep(0.05)
        with pytest.raises(WorkerError, match="worker rank 1 was killed by SIGKILL"):
            pool.call("meet", {"before": 1})


class Cancel(BaseException):
    pass


@pytest.mark.parametrize("phase", ["start", "load", "mid"])
def test_cancel(forked, phase):
    """It takes effect at once, and leaves either a usable pool or nothing."""
    before, polls = leftovers(), []

    def poll():
        polls.append(1)
        if len(polls) == 2:
            raise Cancel

    if phase == "start":
        with pytest.raises(Cancel):
            WorkerPool.start(spec(setup_args={"fail_on": 1, "way": "stall"}), poll=poll)
    else:
        with WorkerPool.start(spec()) as pool:
            processes = pids(pool)
            arena = SharedArena.create({"w": torch.ones(1 << 20)})
            payload = {"seconds": 0.5} | ({"rank": 1} if phase == "mid" else {})
            begin = time.monotonic()
            with pytest.raises(Cancel):
                pool.call("compute", payload, poll=poll)
            assert time.monotonic() - begin < 0.4
            assert pool.call("meet", {"before": 1, "arena": arena.handle()})[1].tolist() == [2]
            assert pids(pool) == processes
        del arena, pool
    assert grown(leftovers, before) == {}


def test_a_long_computation_is_no_fault(forked):
    """Longer than the limit for doing nothing, on one rank only, on a machine that is busy besides."""
    stop = threading.Event()

    def load():
        while not stop.is_set():
            torch.ones(128, 128) @ torch.ones(128, 128)

    with WorkerPool.start(spec()) as pool:
        threads = [threading.Thread(target=load) for _ in range(4)]
        for thread in threads:
            thread.start()
        try:
            for rank in (0, 1):
                pool.call("compute", {"seconds": 1.5, "rank": rank})
        finally:
            stop.set()
            for thread in threads:
                thread.join()


def test_a_call_that_takes_longer_than_before_is_no_fault(forked):
    """Below the limit; another kind of call is not compared with it; and what gets on may take long."""
    # A busy machine may look like a rank that sleeps, at the short limit of the other tests.
    with WorkerPool.start(spec(deadlines=replace(SHORT, stall_s=20.0))) as pool:
        for _ in range(3):
            pool.call("compute", {"seconds": 0.2}, alike="short")
        # As with a GPU that has become slow: it gets on, and the other rank waits for it.
        pool.call("compute", {"seconds": 2.0, "parts": 5}, alike="short")
        pool.call("compute", {"seconds": 0.9}, alike="short")
        pool.call("compute", {"seconds": 1.8}, alike="long")


def test_two_pools_on_one_machine_do_not_touch_each_other(forked):
    with WorkerPool.start(spec()) as first, WorkerPool.start(spec()) as second:
        for pool in (first, second):
            assert pool.call("meet", {"before": 1})[0].tolist() == [2]
        os.kill(pids(first)[0], signal.SIGKILL)
        with pytest.raises(WorkerError, match="rank 0 was killed"):
            first.call("meet", {"before": 1})
        assert second.call("meet", {"before": 1})[0].tolist() == [2]


def test_a_stopped_worker_ends_with_its_killed_parent(forked, tmp_path, monkeypatch):
    """The kernel wakes it up; no thread of its own could."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    read, write = os.pipe()
    parent = os.fork()
    if parent == 0:
        pool = WorkerPool.start(spec())
        os.write(write, " ".join(map(str, pids(pool))).encode())
        time.sleep(60)
        os._exit(0)
    os.close(write)
    processes = [int(pid) for pid in os.read(read, 100).split()]
    os.close(read)
    os.kill(processes[1], signal.SIGSTOP)
    until = time.monotonic() + 2
    while ProcessActivity(processes[1]).look(1) is not Activity.STOPPED and time.monotonic() < until:
        time.sleep(0.01)
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    assert wait_until_gone(processes, LIMIT_S) == []
    assert os.listdir(tmp_path) == []
