"""A sampling on real workers tells what its GPUs did; a speed-up only once one GPU was measured."""

from __future__ import annotations

import os
import signal
import time

import pytest
from comfyui_ferry.core.comfy_adapter import parallel_model as parallel_model_file
from comfyui_ferry.core.comfy_adapter import (
    parallel_readout,
    running_trainings,
    worker_groups,
    worker_notices,
    worker_start,
)
from ferry_support.sampling import CFG_2, ULYSSES_2, parallel, sample
from ferry_support.tiny_patchers import PATCHERS

pytestmark = [pytest.mark.comfy, pytest.mark.timeout(240)]

KIND = "wan"
ONE_GPU = {"gpus": 1, "cfg_degree": 1, "ulysses_degree": 1}


@pytest.fixture
def events(monkeypatch):
    """What browsers are sent."""
    sent = []
    for module in (parallel_readout, worker_notices):
        monkeypatch.setattr(module, "send_event", lambda event, data: sent.append((event, data)))
    monkeypatch.setattr(parallel_model_file, "executing_node_id", lambda: "7")
    monkeypatch.setattr(parallel_readout, "_one_gpu_s", {})
    return sent


def test_a_sampling_tells_what_was_measured_and_no_speed_up_before_one_gpu_was(events):
    model = PATCHERS[KIND].build()
    sample(parallel(model, ULYSSES_2), KIND, steps=4)
    last = [data for event, data in events if event == parallel_readout.EVENT][-1]
    assert (last["node_id"], last["running"], last["devices"]) == ("7", False, [0, 1])
    assert last["ideal_speed_up"] == 2
    assert last["evaluation_s"] > 0
    assert 0 < last["exchange_share"] < 1
    assert all(0 <= rank["computes"] <= 1 and 0 <= rank["waits"] <= 1 for rank in last["ranks"])
    assert last["speed_up"] is None
    assert last in parallel_readout.latest_readouts()
    kinds = [data["kind"] for event, data in events if event == worker_notices.EVENT]
    assert kinds == ["starting", "started"]

    sample(parallel(model, ONE_GPU), KIND, steps=4)
    one = [data for event, data in events if event == parallel_readout.EVENT][-1]
    assert one["speed_up"] == 1.0
    assert one["exchange_share"] == 0.0

    sample(parallel(model, CFG_2), KIND, steps=4)
    two = [data for event, data in events if event == parallel_readout.EVENT][-1]
    assert two["one_gpu_s"] == one["evaluation_s"]
    assert two["speed_up"] == pytest.approx(one["evaluation_s"] / two["evaluation_s"])

    # Idle workers that die are told without a call, and the next ones are new.
    group = worker_groups._current
    assert group is not None
    os.kill(group.pool._group.ranks[1].process.pid, signal.SIGKILL)
    until = time.monotonic() + 20
    while last_kind(events) != "killed" and time.monotonic() < until:
        time.sleep(0.05)
    assert last_kind(events) == "killed"
    sample(parallel(model, CFG_2), KIND, steps=1)
    assert last_kind(events) == "restarted"


def last_kind(events):
    return [data["kind"] for event, data in events if event == worker_notices.EVENT][-1]


def test_outside_of_a_prompt_no_node_shows_it(monkeypatch):
    assert running_trainings.executing_node_id() is None
    assert worker_start.check_interrupt() is None
