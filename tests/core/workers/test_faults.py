"""Every kind of fault at every phase of a pool's life: found within 5 s, told apart, nothing left.

Real processes; on the CPU they are forked (see `ferry_support.forked_workers`), so that trying one takes
tenths of a second. All of it, and the same on two GPUs over NCCL:

    .venv/bin/python -m pytest tests/core/workers/test_faults.py
    FERRY_TEST_DEVICE=cuda .venv/bin/python -m pytest -m multigpu tests/core/workers/test_faults.py
"""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from comfyui_ferry.core.errors import WorkerError
from comfyui_ferry.core.workers import Deadlines, SharedArena, WorkerPool
from comfyui_ferry.core.workers.activity import Activity, ProcessActivity
from ferry_support import forked_workers
from ferry_support.worker_specs import cpu_spec, exists, grown, open_files, pids, wait_until_gone

LIMIT_S = 5.0
# The default is 2.5 s; less here keeps the suite short.
SHORT = Deadlines(start_s=60, call_s=60, collective_s=60, stall_s=0.6, heartbeat_s=30, close_s=1.0)
TOLD = {
    "kill": "worker rank 1 was killed by SIGKILL",
    "stop": "worker rank 1 was stopped by a signal (SIGSTOP)",
    "stall": "worker rank 1 was idle",
    "native": "worker rank 1 was idle",
    "raise": "worker rank 1 raised KeyError: 'a planted error'",
    "oom": "worker rank 1 raised RuntimeError",
}
# What the rank was doing, from its own traceback or from the stack that it was made to write.
TRACED = {"kill": "", "stop": "in ", "stall": "in planted_stall", "native": "in commit_fault",
          "raise": "in commit_fault", "oom": "in planted_allocation"}  # fmt: skip


@pytest.fixture
def forked(monkeypatch):
    forked_workers.install(monkeypatch)


def spec(**changes):
    return cpu_spec(2, **{"deadlines": SHORT, **changes})


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


def assert_found(begin: float, error: BaseException, kind: str, processes: list[int]) -> None:
    seconds = time.monotonic() - begin
    assert seconds < LIMIT_S
    assert not any(exists(pid) for pid in processes)
    text = str(error)
    print(f"{seconds:.1f} s: {text.splitlines()[0]}")  # what docs/reliability.md lists
    assert TOLD[kind] in text.splitlines()[0], text
    assert TRACED[kind] in text.partition("--- rank 1")[2], text


def fault_in_a_call(pool: WorkerPool, phase: str, kind: str) -> None:
    payload = {"rank": 1, "kind": kind, "after": 1}
    if phase == "load":
        payload["arena"] = SharedArena.create({"w": torch.ones(1 << 20)}).handle()
    if phase in ("between", "mid"):
        pool.call("meet", {"before": 2})
    if phase == "mid":
        payload["before"] = 3
    processes = pids(pool)
    begin = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        if phase == "between":
            os.kill(processes[1], {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[kind])
            payload = {"after": 1}
        pool.call("meet", payload)
    assert_found(begin, caught.value, kind, processes)
    del payload


IN_CALLS = [(phase, kind) for phase in ("load", "first", "mid") for kind in TOLD]
BETWEEN = [("between", "kill"), ("between", "stop")]
# Each kind and each phase at least once; the whole table is for `-m slow`.
QUICK = {("load", "oom"), ("load", "native"), ("first", "raise"), ("first", "stop"), ("mid", "kill"),
         ("mid", "stall"), ("between", "stop")}  # fmt: skip


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
    ["oom", "stall", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("kill", "stop", "native"))],
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


@pytest.mark.parametrize("kind", ["kill", "stop", "stall"])
def test_a_fault_at_the_end(forked, kind):
    """Closing takes no longer because a rank does not answer."""
    before = leftovers()
    pool = WorkerPool.start(spec())
    processes = pids(pool)
    if kind == "stall":
        pool.submit("meet", {"rank": 1, "kind": "stall"})
    else:
        os.kill(processes[1], {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[kind])
    begin = time.monotonic()
    pool.close()
    assert time.monotonic() - begin < LIMIT_S
    assert not any(exists(pid) for pid in processes)
    del pool
    assert grown(leftovers, before) == {}


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


@pytest.mark.multigpu
@pytest.mark.parametrize(("phase", "kind"), [*IN_CALLS, *BETWEEN])
def test_a_fault_on_gpus(phase, kind):
    before = leftovers()
    # The default limit: NCCL's first collective may wait a while for the other rank.
    deadlines = Deadlines(start_s=120, call_s=60, collective_s=60)
    with WorkerPool.start(spec(devices=(0, 1), backend="nccl", deadlines=deadlines)) as pool:
        if phase != "first":
            pool.call("meet", {"before": 1})
        fault_in_a_call(pool, phase, kind)
    after = leftovers()
    assert {**after, "files": 0} == {**before, "files": 0}
