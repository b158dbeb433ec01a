"""A MODEL computed on two nodes of a real Ray cluster; both are on this machine."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import threading
import time

import psutil
import pytest
from comfyui_ferry.core.comfy_adapter import close_workers, worker_groups, worker_start
from comfyui_ferry.core.errors import RequestError, WorkerError
from comfyui_ferry.core.workers import ClusterPool
from ferry_support.ray_cluster import RayCluster
from ferry_support.sampling import TOLERANCE, ULYSSES_2, difference, parallel, sample, with_lora
from ferry_support.tiny_models import noise
from ferry_support.tiny_patchers import PATCHERS
from ferry_support.worker_specs import wait_until_gone

pytestmark = [pytest.mark.comfy, pytest.mark.timeout(280)]

KIND = "wan"


@pytest.fixture(scope="module")
def cluster():
    if importlib.util.find_spec("ray") is None:
        pytest.skip("needs ray")
    close_workers()
    started = RayCluster(2)
    yield started
    close_workers()
    started.close()


def pool() -> ClusterPool:
    group = worker_groups._current
    assert group is not None and isinstance(group.pool, ClusterPool)
    return group.pool


@pytest.mark.slow  # a minute; what it stands on is in core/workers/cluster
def test_a_model_spans_two_nodes_and_a_lost_rank_ends_the_prompt(cluster):
    """The picture of one process; another LoRA, size or prompt sends no weights again."""
    model = PATCHERS[KIND].build()
    degrees = ULYSSES_2 | {"ray_address": cluster.address}
    assert (
        difference(sample(parallel(model, degrees), KIND, steps=2), sample(model, KIND, steps=2)) <= TOLERANCE
    )
    first = pool()
    assert [list(ranks) for _, ranks in first.nodes] == [[0], [1]]
    sent = {place: vars(copy).copy() for place, copy in first._files._copies.items()}
    assert sorted(copy["shared"] for copy in sent.values()) == [False, True]  # once over the network
    for strength, size in ((0.5, (6, 10)), (0.9, (10, 8)), (0.0, (8, 6))):
        patched = with_lora(model, strength)
        latent = {"samples": noise(1, 16, 1, *size)}
        result = sample(parallel(patched, degrees), KIND, latent=latent, steps=1)
        assert difference(result, sample(patched, KIND, latent=latent, steps=1)) <= TOLERANCE
    assert pool() is first
    assert {place: vars(copy) for place, copy in first._files._copies.items()} == sent
    assert "ray" not in sys.modules

    agents = cluster.agents()
    victims = [child.pid for agent in agents for child in psutil.Process(agent).children()]
    times = []

    def strike():
        times.append(time.monotonic())
        os.kill(victims[0], signal.SIGKILL)

    threading.Timer(0.3, strike).start()
    with pytest.raises(WorkerError, match=r"node .*was killed by SIGKILL"):
        sample(parallel(model, degrees), KIND, steps=500)
    assert time.monotonic() - times[0] < 5
    assert wait_until_gone([*agents, *victims], 5) == []


def test_a_cluster_that_is_not_there_is_refused_before_anything_starts():
    model = PATCHERS[KIND].build()
    close_workers()
    with pytest.raises(RequestError, match=r"ray_address=.198\.51\.100\.7:6379.*not a node of that cluster"):
        sample(parallel(model, ULYSSES_2 | {"ray_address": "198.51.100.7:6379"}), KIND)
    assert worker_groups._current is None
    with pytest.raises(RequestError, match="connect a STRING"):
        parallel(model, ULYSSES_2 | {"ray_address": 7})


def test_folders_of_this_machine_stay_here():
    words = (
        "--listen --base-directory /a --fast fp16 x --front-end-root=/b --extra-model-paths-config c d --cpu"
    )
    assert worker_start.without_folders(words.split()) == ["--listen", "--fast", "fp16", "x", "--cpu"]
