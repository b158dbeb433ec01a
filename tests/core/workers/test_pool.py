from __future__ import annotations

import datetime
import gc
import os
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from comfyui_ferry.core.errors import RequestError, WorkerError
from comfyui_ferry.core.workers import Deadlines, WorkerPool
from comfyui_ferry.core.workers.spec import RankSpan
from ferry_support.worker_specs import cpu_spec, exists, grown, open_files, pids, wait_until_gone


class Interrupt(BaseException):
    """Like ComfyUI's, which no `except Exception` sees."""


def everything() -> dict:
    return {
        "none": None,
        "numbers": [True, 3, 2.5, float("inf")],
        "nested": {"a": ({"b": [b"bytes", "text"]},), 7: torch.Size([1, 2])},
        "meta": [torch.bfloat16, torch.device("cpu")],
        "tensors": {
            str(dtype): torch.arange(6).to(dtype).view(2, 3)
            for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex64)
        },
        "odd": (torch.tensor(1.5), torch.empty(0, 3), torch.arange(12).view(3, 4).mT[::2]),
    }


def equal(left, right) -> bool:
    if isinstance(left, torch.Tensor):
        if (left.dtype, left.shape) != (right.dtype, right.shape):
            return False
        left, right = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (left, right))
        return torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(equal(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return type(left) is type(right) and all(map(equal, left, right)) and len(left) == len(right)
    return type(left) is type(right) and left == right


@pytest.fixture(autouse=True)
def private_temporary_directory(monkeypatch, tmp_path):
    """Other pools of this machine must not be counted."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def leftovers() -> dict[str, int]:
    """Descriptors, child processes (zombies too) and private directories of this process' pools."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    mine = f"comfyui-ferry-{os.getpid()}-"
    directories = [name for name in os.listdir(tempfile.gettempdir()) if name.startswith(mine)]
    return {"files": len(open_files()), "processes": len(children), "directories": len(directories)}


def test_everything_makes_the_round_trip_to_each_rank(pool):
    value = everything()
    results = pool.call("echo", {"value": value})
    assert list(results) == [0, 1]
    assert all(equal(value, result) for result in results.values())
    assert all(torch.cuda.is_available() or not t.is_cuda for t in results[0]["tensors"].values())


def test_the_ranks_meet_in_a_collective(pool):
    results = pool.call("sum", {"value": torch.ones(3)})
    assert [result.tolist() for result in results.values()] == [[3, 3, 3], [3, 3, 3]]


def test_payloads_by_rank_reach_their_rank(pool):
    results = pool.call("echo", payloads_by_rank={1: {"value": torch.ones(2)}, 0: {"value": "zero"}})
    assert results[0] == "zero"
    assert results[1].tolist() == [1, 1]


def test_a_rank_that_changes_its_argument_changes_nobody_elses(pool):
    value = torch.arange(4.0)
    results = pool.call("negate", {"value": value})
    assert all(result.tolist() == [0, -1, -2, -3] for result in results.values())
    assert value.tolist() == [0, 1, 2, 3]


def test_arguments_that_a_job_keeps_survive_later_calls(pool):
    pool.call("keep", {"value": torch.ones(1000)})
    for step in range(5):
        pool.call("echo", {"value": torch.full((1000,), float(step))})
    assert all(kept.sum() == 1000 for kept in pool.call("kept").values())


def test_a_borrowing_job_reads_the_one_shared_buffer(pool):
    value = torch.ones(100_000)
    addresses = {pool.call("borrow", {"value": value}, ranks=[0])[0][1] for _ in range(5)}
    assert len(addresses) == 1
    assert pool.call("borrow", {"value": value})[1][0] == 100_000


def test_results_belong_to_the_caller(pool):
    first = pool.call("echo", {"value": torch.ones(1000)}, ranks=[0])[0]
    pool.call("echo", {"value": torch.zeros(1000)}, ranks=[0])
    assert first.sum() == 1000


def test_calls_work_from_a_thread_in_inference_mode(pool):
    results = []

    def prompt():
        with torch.inference_mode():
            results.append(pool.call("echo", {"value": torch.ones(3) * 2})[0])

    thread = threading.Thread(target=prompt)
    thread.start()
    thread.join(20)
    assert results[0].tolist() == [2, 2, 2]
    assert not results[0].is_inference()


def test_calls_on_different_ranks_run_at_the_same_time(pool):
    begin = time.monotonic()
    calls = [pool.submit("sleep", {"seconds": 0.5}, ranks=[rank]) for rank in (0, 1)]
    assert [call.wait() for call in calls] == [{0: 0}, {1: 1}]
    assert time.monotonic() - begin < 0.9  # one after the other takes 1 s


def test_uneven_calls_from_two_threads_stay_apart(pool):
    errors, shapes = [], {0: (3, 5), 1: (2, 70, 11)}

    def branch(rank: int) -> None:
        try:
            for step in range(50):
                value = torch.full(shapes[rank], float(step + 1000 * rank))
                result = pool.call("echo", {"value": [step, value]}, ranks=[rank])[rank]
                assert result[0] == step
                assert torch.equal(result[1], value)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=branch, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert errors == []


def test_collectives_submitted_by_many_threads_do_not_cross(pool):
    errors = []

    def caller(number: int) -> None:
        try:
            for _ in range(10):
                results = pool.call("sum", {"value": torch.full((number + 1,), float(number))})
                assert all(r.tolist() == [2.0 * number + 1] * (number + 1) for r in results.values())
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=caller, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert errors == []


def test_an_interrupt_abandons_the_call_and_the_pool_goes_on(pool):
    polls = []

    def poll():
        polls.append(time.monotonic())
        if len(polls) == 4:
            raise Interrupt

    begin = time.monotonic()
    with pytest.raises(Interrupt):
        pool.call("sleep", {"seconds": 1.0}, poll=poll)
    assert time.monotonic() - begin < 0.8  # long before the job is over
    assert pool.alive
    # Waits for the abandoned call to drain, then gets its own result and not the late one.
    assert pool.call("echo", {"value": "mine"}) == {0: "mine", 1: "mine"}
    assert pool._calls.running() == []


def test_two_hundred_calls_leave_nothing(pool):
    def call(step: int) -> None:
        value = torch.full((1000 + 37 * (step % 7),), float(step))
        assert torch.equal(pool.call("echo", {"value": value})[1], value)

    for step in range(10):
        call(step)
    # A buffer that its borrower gives back late is lent no more for a moment, and another one is made.
    before = leftovers()
    before["files"] += 4
    in_workers = [result["files"] for result in pool.call("describe").values()]
    for step in range(200):
        call(step)
    assert grown(leftovers, before) == {}
    in_workers_after = [result["files"] for result in pool.call("describe").values()]
    assert all(after <= before + 4 for before, after in zip(in_workers, in_workers_after, strict=True))


@pytest.mark.parametrize("ranks", [[], [2], [-1], [0, 0]])
def test_ranks_that_do_not_exist_are_refused(pool, ranks):
    with pytest.raises(RequestError, match=r"ranks .* were asked"):
        pool.call("echo", {"value": 1}, ranks=ranks)


def test_a_job_that_does_not_exist_is_refused_with_those_that_do(pool):
    with pytest.raises(RequestError, match=r"job 'dance' was asked.*echo"):
        pool.call("dance")
    with pytest.raises(RequestError, match="job 'start' was asked"):
        pool.call("start")


def test_what_cannot_be_sent_is_refused_here_and_the_pool_goes_on(pool):
    with pytest.raises(TypeError, match=r"payload\.value\.transformer_options\.foo cannot be sent"):
        pool.call("echo", {"value": {"transformer_options": {"foo": object()}}})
    with pytest.raises(TypeError, match="by name"):
        pool.call("echo", {1: 2})
    with pytest.raises(ValueError, match="one or the other"):
        pool.submit("echo", {"value": 1}, payloads_by_rank={0: {"value": 1}})
    assert pool.call("echo", {"value": 1}, ranks=[0]) == {0: 1}


def test_a_start_that_is_interrupted_leaves_nothing():
    with WorkerPool.start(cpu_spec(1)) as pool:  # whatever a first pool leaves for good is there now
        pool.call("describe")
    before = leftovers()
    for _ in range(15):
        polls = []

        def poll():
            polls.append(1)  # noqa: B023
            if len(polls) == 3:  # noqa: B023
                raise Interrupt

        with pytest.raises(Interrupt):
            WorkerPool.start(cpu_spec(2), poll=poll)
    assert grown(leftovers, before) == {}


def test_started_and_closed_again_and_again_it_leaves_nothing():
    def cycle():
        with WorkerPool.start(cpu_spec(1)) as pool:
            processes = pids(pool)
            assert pool.call("echo", {"value": torch.ones(100_000)})[0].sum() == 100_000
        pool.close()
        assert not pool.alive
        assert not any(exists(pid) for pid in processes)
        with pytest.raises(WorkerError, match="the pool was closed"):
            pool.call("describe")

    gc.collect()
    before = leftovers()
    for _ in range(2):
        cycle()
    gc.collect()
    assert grown(leftovers, before) == {}


def test_a_pool_started_in_a_thread_serves_others_and_ends_when_it_is_forgotten():
    pools = []

    def prompt():
        with torch.inference_mode():
            pools.append(WorkerPool.start(cpu_spec(1)))

    thread = threading.Thread(target=prompt)
    thread.start()
    thread.join(60)
    processes = pids(pools[0])
    time.sleep(1.2)  # the starting thread is long gone; PDEATHSIG would have killed the worker
    assert pools[0].call("sum", {"value": torch.ones(1)})[0].tolist() == [1]
    pools.clear()
    gc.collect()
    assert wait_until_gone(processes, 5) == []


def test_setup_arguments_that_cannot_be_sent_are_refused_before_any_process():
    before = leftovers()
    with pytest.raises(TypeError, match=r"setup_args\.fail_on cannot be sent"):
        WorkerPool.start(cpu_spec(2, setup_args={"fail_on": object()}))
    assert grown(leftovers, before) == {}


@pytest.mark.skipif(torch.cuda.is_available(), reason="about a machine without GPUs")
def test_a_gpu_that_is_not_there_is_refused_before_any_process():
    before = leftovers()
    with pytest.raises(RequestError, match="torch sees 0 GPUs"):
        WorkerPool.start(cpu_spec(2, devices=(0, 1), backend="nccl"))
    assert grown(leftovers, before) == {}


def test_two_pools_compute_together_as_the_ranks_of_one_world():
    """As they do on two machines; and the ranks that wait for the other pool's are no fault."""
    store = dist.TCPStore("127.0.0.1", 0, 2, True, datetime.timedelta(seconds=30), wait_for_workers=False)
    limits = Deadlines(start_s=60, call_s=30, stall_s=0.5)
    spans = [RankSpan(rank, 2, f"127.0.0.1:{store.port}") for rank in (0, 1)]
    specs = [cpu_spec(1, span=span, deadlines=limits) for span in spans]
    pools: list[WorkerPool] = []
    threads = [
        threading.Thread(target=lambda spec=spec: pools.append(WorkerPool.start(spec))) for spec in specs
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    first, second = sorted(pools, key=lambda pool: pool.ranks[0])
    with first, second:
        waiting = first.submit("meet", {"after": 1})
        time.sleep(limits.stall_s + 1)
        second.call("meet", {"after": 1})
        assert waiting.wait() == {0: torch.tensor([2.0])}
        assert second.call("describe")[1]["rank"] == 1
        with pytest.raises(RequestError, match="has ranks 1 to 1"):
            second.call("echo", {"value": 1}, ranks=[0])
