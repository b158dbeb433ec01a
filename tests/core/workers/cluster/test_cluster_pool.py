"""A pool over the nodes of a real Ray cluster, all of them on this machine."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch
from comfyui_ferry.core.errors import RequestError, WorkerError
from comfyui_ferry.core.workers import ClusterPool, ClusterSpec, Deadlines, SharedArena
from ferry_support.worker_specs import cpu_spec, exists, grown, open_files, wait_until_gone

pytestmark = pytest.mark.timeout(280)


class Interrupt(BaseException):
    """Like ComfyUI's, which no `except Exception` sees."""


@pytest.fixture(scope="module")
def pool(ray_cluster):
    """One rank on each of two nodes, for the tests that leave it as it is; the last one does not."""
    with ClusterPool.start(spec(2), ClusterSpec(ray_cluster.address)) as started:
        yield started


def spec(num_ranks: int):
    """Room for a busy machine: an agent and then a rank import PyTorch on each node."""
    return cpu_spec(num_ranks, deadlines=Deadlines(start_s=200, call_s=60, collective_s=60))


def left() -> dict[str, int]:
    """Descriptors, children and private folders of this process."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    mine = f"comfyui-ferry-{os.getpid()}-"
    folders = [name for name in os.listdir(tempfile.gettempdir()) if name.startswith(mine)]
    return {"files": len(open_files()), "processes": len(children), "folders": len(folders)}


def folders_of(pids) -> list[str]:
    return [
        name for name in os.listdir("/tmp") if name.startswith(tuple(f"comfyui-ferry-{p}-" for p in pids))
    ]


def test_payloads_and_collectives_span_the_nodes(pool):
    assert pool.ranks == range(2) and [list(ranks) for _, ranks in pool.nodes] == [[0], [1]]
    value = {"t": torch.arange(5).to(torch.bfloat16), "n": [None, 1.5, b"x"], "e": torch.empty(0, 3)}
    for result in pool.call("echo", {"value": value}).values():
        assert (
            torch.equal(result["t"], value["t"]) and result["n"] == value["n"] and result["e"].shape == (0, 3)
        )
    assert [sums.tolist() for sums in pool.call("sum", {"value": torch.ones(3)}).values()] == [[3, 3, 3]] * 2
    own = pool.call("echo", payloads_by_rank={1: {"value": "one"}, 0: {"value": torch.zeros(2)}})
    assert own[1] == "one" and own[0].tolist() == [0, 0]
    with pytest.raises(RequestError, match="job 'dance' was asked"):
        pool.call("dance")
    with pytest.raises(TypeError, match=r"payload\.value cannot be sent"):
        pool.call("echo", {"value": object()})


def test_weights_are_there_on_both_nodes_and_follow_changes(pool):
    arena = SharedArena.create({"w": torch.randn(1_000_000)})
    for _ in range(2):
        pool.call("open", {"arena": arena.handle()})
    assert all(torch.equal(read, arena.tensors["w"]) for read in pool.call("read", {"name": "w"}).values())
    arena.write("w", torch.ones(1_000_000))
    pool.call("open", {"arena": arena.handle()})
    assert all(read.sum() == 1_000_000 for read in pool.call("read", {"name": "w"}).values())


def test_a_cancelled_call_leaves_the_pool_as_it_was(pool):
    polls = []

    def poll():
        polls.append(1)
        if len(polls) == 3:
            raise Interrupt

    begin = time.monotonic()
    with pytest.raises(Interrupt):
        pool.call("sleep", {"seconds": 1.0}, poll=poll)
    assert time.monotonic() - begin < 0.9
    calls = [pool.submit("echo", {"value": rank}, ranks=[rank]) for rank in (1, 0)]
    assert [call.wait() for call in calls] == [{1: 1}, {0: 0}]


def test_more_ranks_than_the_cluster_has_are_refused(ray_cluster):
    before = left()
    with pytest.raises(RequestError, match=r"gpus=3 was asked.*2 nodes have 2 CPUs in all"):
        ClusterPool.start(spec(3), ClusterSpec(ray_cluster.address))
    assert grown(left, before) == {}


def test_a_killed_rank_ends_the_call_and_everything_with_it(pool, ray_cluster):
    agents = ray_cluster.agents()
    ranks = [described["pid"] for described in pool.call("describe").values()]
    assert len(agents) == 2 and all(map(exists, ranks))
    begin = time.monotonic()
    with pytest.raises(WorkerError, match=r"^node .* \(rank 1\): worker rank 1 was killed by SIGKILL"):
        pool.call("kill_on", {"rank": 1})
    assert time.monotonic() - begin < 5
    assert not pool.alive
    with pytest.raises(WorkerError, match="the pool is lost"):
        pool.call("describe")
    assert wait_until_gone([*agents, *ranks], 5) == []
    assert folders_of(agents) == []
    assert "ray" not in sys.modules


def test_a_node_that_dies_ends_the_call_and_a_wrong_one_in_its_place_is_refused(ray_cluster, tmp_path):
    """The next pool after the fault before works: it is the one that this fault ends."""
    before = left()
    pool = ClusterPool.start(spec(2), ClusterSpec(ray_cluster.address))
    assert [sums.tolist() for sums in pool.call("sum", {"value": torch.ones(1)}).values()] == [[3], [3]]
    agents = ray_cluster.agents()
    killed = []
    strike = threading.Timer(0.5, lambda: (killed.append(time.monotonic()), ray_cluster.kill_last_node()))
    strike.start()
    with pytest.raises(WorkerError, match=r"^node .* \(rank 1\): it is gone"):
        pool.call("stall_on", {"rank": 0})
    assert time.monotonic() - killed[0] < 5
    strike.join()
    assert wait_until_gone(agents, 5) == []
    with pytest.raises(RequestError, match=r"1 nodes have 1 CPUs"):
        ClusterPool.start(spec(2), ClusterSpec(ray_cluster.address))
    ray_cluster.add_node(COMFYUI_FERRY_ROOT=str(tmp_path))
    with pytest.raises(
        RequestError, match=r"rank.*not like this machine: the pack is not in .*docs/clusters"
    ):
        ClusterPool.start(spec(2), ClusterSpec(ray_cluster.address))
    assert wait_until_gone(ray_cluster.agents(), 5) == []
    assert grown(left, before) == {}
