"""Faults, with real processes: each ends in an error that tells what happened, and in no process left."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch
from comfyui_ferry.core.errors import WorkerError
from comfyui_ferry.core.workers import Deadlines, WorkerPool
from ferry_support import forked_workers
from ferry_support.worker_specs import cpu_spec, exists, pids


@pytest.fixture(autouse=True)
def forked(monkeypatch):
    """Starting afresh is tried in `test_pool` and `test_bootstrap`; these faults come later."""
    forked_workers.install(monkeypatch)


QUICK = Deadlines(start_s=60, call_s=2, collective_s=30, heartbeat_s=2, close_s=3)


def fail(pool: WorkerPool, job: str, payload: dict, *, within_s: float) -> str:
    """Run a job that loses the pool; return the error's text."""
    processes = pids(pool)
    begin = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        pool.call(job, payload)
    assert time.monotonic() - begin < within_s
    assert not any(exists(pid) for pid in processes)
    assert not pool.alive
    with pytest.raises(WorkerError, match="Start a new pool"):
        pool.call("describe")
    return str(caught.value)


@pytest.mark.parametrize(
    ("num_ranks", "job", "payload", "expected"),
    [
        (2, "raise_on", {"rank": 1}, ["worker rank 1 raised KeyError: 'a planted error'", "in job_raise_on"]),
        (1, "raise_on", {"rank": 0, "how": "exit"}, ["worker rank 0 raised SystemExit: 5", "job_raise_on"]),
        (2, "kill_on", {"rank": 1}, ["worker rank 1 was killed by SIGKILL"]),
        (1, "crash_on", {"rank": 0}, ["was killed by SIGSEGV", "Fatal Python error", "job_crash_on"]),
        (
            2,
            "stall_on",
            {"rank": 1},
            ["no reply from rank 0, 1 within its deadline of 2 s", "in planted_stall"],
        ),
        (1, "unsendable", {}, ["TypeError: the result of job 'unsendable'.outer[0] cannot be sent"]),
    ],
    ids=["raises", "exits-by-exception", "killed", "crashes", "stalls", "unsendable-result"],
)
def test_a_rank_that_fails_in_a_call(num_ranks, job, payload, expected):
    with WorkerPool.start(cpu_spec(num_ranks, deadlines=QUICK)) as pool:
        text = fail(pool, job, payload, within_s=5)
        sections = [f"--- rank {rank} (device cpu, pid {pid})" for rank, pid in enumerate(pids(pool))]
        for part in [*expected, *sections, f"'{job}' on ranks {list(pool.ranks)}"]:
            assert part in text


def test_a_native_call_that_keeps_the_interpreters_lock_is_found_by_the_heartbeat():
    """It uses a core all the time, as a computation does; only that no Python thread runs tells."""
    deadlines = Deadlines(start_s=60, call_s=60, heartbeat_s=1.5)
    with WorkerPool.start(cpu_spec(1, deadlines=deadlines)) as pool:
        text = fail(pool, "spin_natively", {}, within_s=5)
    assert "worker rank 0 has run no Python for 2 s" in text
    assert "in job_spin_natively" in text


def test_every_pending_call_ends_and_a_new_pool_works():
    with WorkerPool.start(cpu_spec(2)) as pool:
        errors = {}

        def wait(rank: int) -> None:
            try:
                pool.call("sleep", {"seconds": 20}, ranks=[rank])
            except WorkerError as error:
                errors[rank] = str(error)

        threads = [threading.Thread(target=wait, args=(rank,)) for rank in (0, 1)]
        for thread in threads:
            thread.start()
        time.sleep(0.3)
        os.kill(pids(pool)[0], signal.SIGKILL)
        begin = time.monotonic()
        for thread in threads:
            thread.join(10)
        assert time.monotonic() - begin < 5
        assert errors.keys() == {0, 1}
        assert all("rank 0 was killed by SIGKILL" in text for text in errors.values())
        # The rank that only slept was asked for its stacks before it was stopped.
        assert all("in job_sleep" in text for text in errors.values())
    with WorkerPool.start(cpu_spec(2)) as pool:
        assert pool.call("sum", {"value": torch.ones(1)})[0].tolist() == [3]


def test_a_rank_lost_between_calls_is_noticed_at_once():
    with WorkerPool.start(cpu_spec(1)) as pool:
        assert pool.alive
        os.kill(pids(pool)[0], signal.SIGKILL)
        until = time.monotonic() + 5
        while not pool._calls.ended and time.monotonic() < until:
            time.sleep(0.02)
        assert not pool.alive
        with pytest.raises(WorkerError, match=r"pool is lost \(worker rank 0 was killed by SIGKILL"):
            pool.call("describe")


def test_a_deadline_of_one_call_and_of_an_abandoned_one():
    with WorkerPool.start(cpu_spec(1)) as pool:
        pending = pool.submit("sleep", {"seconds": 30}, deadline_s=0.5)
        pending.abandon()
        with pytest.raises(
            WorkerError, match=r"'sleep' had no reply from rank 0 within its deadline of 0.5 s"
        ):
            pool.call("echo", {"value": 1})


def test_closing_ends_a_call_under_way():
    with WorkerPool.start(cpu_spec(1)) as pool:
        threading.Timer(0.3, pool.close).start()
        begin = time.monotonic()
        with pytest.raises(WorkerError, match="closed while this call was under way"):
            pool.call("sleep", {"seconds": 20})
        assert time.monotonic() - begin < 5


def test_a_call_that_ends_because_a_rank_died_says_so_though_the_pool_is_closed_first(monkeypatch):
    with WorkerPool.start(cpu_spec(2)) as pool:
        call = pool.submit("sleep", {"seconds": 20}, ranks=[0])
        monkeypatch.setattr(pool._watchdog, "_read", lambda rank: None)  # it has not been told yet
        process = pool._group.ranks[1].process
        process.kill()
        process.wait(10)
        pool.close()
        with pytest.raises(WorkerError, match="rank 1 was killed by SIGKILL"):
            call.wait()


@pytest.mark.parametrize(
    ("way", "start_s", "expected"),
    [
        ("refuse", 60, ["rank 1 raised ValueError: set-up went wrong on purpose", "in register"]),
        ("exit", 60, ["rank 1 exited with code 7", "these are my last words"]),
        ("stall", 60, ["job 'start' hangs: worker rank 1 was idle for 1 s", "in register"]),
    ],
)
def test_a_rank_that_fails_at_start_stops_them_all(way, start_s, expected, monkeypatch):
    groups = []
    original = WorkerPool.__init__

    def remember(self, spec, group):
        groups.append(group)
        original(self, spec, group)

    monkeypatch.setattr(WorkerPool, "__init__", remember)
    begin = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        WorkerPool.start(
            cpu_spec(
                2,
                setup_args={"fail_on": 1, "way": way},
                deadlines=Deadlines(start_s=start_s, stall_s=1),
            )
        )
    assert time.monotonic() - begin < 30  # not the 60 of the deadline; starting takes what it takes
    for part in expected:
        assert part in str(caught.value)
    assert not any(exists(rank.process.pid) for rank in groups[0].ranks)
    assert not groups[0].directory.exists()


def test_a_setup_that_does_not_import_is_reported_with_its_traceback():
    with pytest.raises(WorkerError, match=r"rank 0 raised AttributeError: .*has no attribute 'register'"):
        WorkerPool.start(cpu_spec(1, setup="core.workers.report"))


def test_looking_for_hangs_does_not_hold_up_replies(monkeypatch):
    """It reads many small files; four times a second is enough, however many calls there are."""
    with WorkerPool.start(cpu_spec(1)) as pool:
        looks, find = [], pool._watchdog._stalls.find
        monkeypatch.setattr(
            pool._watchdog._stalls, "find", lambda *calls, **how: looks.append(calls) or find(*calls, **how)
        )
        begin = time.monotonic()
        for _ in range(100):
            pool.call("echo", {"value": 1})
        assert len(looks) <= (time.monotonic() - begin) / 0.25 + 1
