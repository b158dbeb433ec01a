from __future__ import annotations

import time

import pytest
import torch
from comfyui_ferry.core.errors import WorkerError
from comfyui_ferry.core.workers import WorkerPool, borrows_arguments
from comfyui_ferry.core.workers.worker import _BORROWS, _MAX_TRACEBACK_CHARS, _describe
from ferry_support.worker_specs import cpu_spec, pids, wait_until_gone


def test_borrowing_is_a_mark_on_the_job():
    @borrows_arguments
    def job(value):
        return value

    assert getattr(job, _BORROWS)
    assert job(3) == 3


@pytest.mark.gpu
def test_a_worker_on_a_gpu_sees_that_one_alone_and_answers_on_the_cpu():
    with WorkerPool.start(cpu_spec(1, devices=(0,), backend="nccl")) as pool:
        described = pool.call("describe")[0]
        assert described["device"] == torch.device("cuda", 0)
        assert described["visible"].startswith("GPU-")
        result = pool.call("sum", {"value": torch.ones(3, device="cuda")})[0]
        assert result.device.type == "cpu"
        assert result.tolist() == [1, 1, 1]


@pytest.mark.multigpu
def test_gpu_ranks_meet_through_nccl_and_a_killed_one_ends_the_call():
    with WorkerPool.start(cpu_spec(2, devices=(0, 1), backend="nccl")) as pool:
        assert pool.call("sum", {"value": torch.ones(3)})[1].tolist() == [3, 3, 3]
        processes = pids(pool)
        begin = time.monotonic()
        with pytest.raises(WorkerError, match="rank 1 was killed by SIGKILL"):
            pool.call("kill_on", {"rank": 1})
        assert time.monotonic() - begin < 5
        assert wait_until_gone(processes, 2) == []


def test_a_long_traceback_keeps_its_end():
    try:
        raise ValueError("\u4e2d" * 50_000 + "the end")
    except ValueError as error:
        described = _describe(error)
    assert len(described["traceback"]) == _MAX_TRACEBACK_CHARS
    assert described["traceback"].rstrip().endswith("the end")
    assert described["summary"].startswith("ValueError")


def test_the_context_tells_the_worker_what_it_is(pool):
    described = pool.call("describe")
    assert [(r["rank"], r["world_size"], r["device"]) for r in described.values()] == [
        (0, 2, torch.device("cpu")),
        (1, 2, torch.device("cpu")),
    ]
    assert len({r["pid"] for r in described.values()}) == 2
