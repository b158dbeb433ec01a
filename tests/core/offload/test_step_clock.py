"""Seconds, stalls and the verdict."""

from __future__ import annotations

import pytest
import torch
from comfyui_ferry.core.offload import OffloadTrainingManager, marks
from comfyui_ferry.core.offload.step_clock import StepClock, bound_of
from comfyui_ferry.core.offload.transfer import Transfer
from ferry_support.offload_cases import build, inputs


@pytest.fixture
def now(monkeypatch):
    """A clock that moves when it is told to."""
    time = [100.0]
    monkeypatch.setattr(marks.time, "perf_counter", lambda: time[0])
    return time


def test_sums_and_the_last_step(now):
    clock = StepClock(torch.device("cpu"))
    clock.waited(now[0])  # outside of any step: not counted
    for stall, moved in ((0.5, 10), (2.0, 40)):
        clock.begin((moved, 0))
        start, now[0] = now[0], now[0] + stall
        clock.waited(start)
        now[0] += 7.0
        clock.begin((999, 999))  # a second forward of the same step
        clock.end((3 * moved, moved))
        clock.end((0, 0))
    assert (clock.num_steps, clock.step_s, clock.stalled_s) == (2, 16.5, 2.5)
    assert clock.last is not None and clock.last.bound == "link-bound"
    assert (clock.last.step_s, clock.last.stalled_s) == (9.0, 2.0)
    assert (clock.last.moved_to_target_bytes, clock.last.moved_to_host_bytes) == (80, 40)


def test_many_waits_without_an_end_are_kept_as_a_sum(now):
    clock = StepClock(torch.device("cpu"))
    clock.begin((0, 0))
    for _ in range(2000):
        start, now[0] = now[0], now[0] + 0.25
        clock.waited(start)
    assert clock._open is not None and len(clock._open.waits) < 300
    clock.end((0, 0))
    assert clock.stalled_s == 500.0


def test_the_verdict_follows_its_rule():
    assert bound_of(10.0, 0.51) == "link-bound"
    assert bound_of(10.0, 0.5) == "compute-bound"


def test_stats_of_a_run(monkeypatch, now):
    """Each copy takes one tick of the clock and each forward a hundred, so both are counted exactly."""
    plain_copy = Transfer._copy_now

    def slow_copy(self, source, destination):
        now[0] += 1.0
        plain_copy(self, source, destination)

    monkeypatch.setattr(Transfer, "_copy_now", slow_copy)
    model = build("residual")
    manager = OffloadTrainingManager(model, "cpu", True)
    stats = manager.stats()
    assert stats.num_steps == 0 and stats.bound is None and stats.last_step is None
    before = now[0]
    for step in range(2):
        loss = model(inputs(step)).square().mean()
        now[0] += 100.0
        loss.backward()
        manager.after_backward()
    stats = manager.stats()
    copies = now[0] - before - 200.0
    assert copies > 2 * stats.num_buckets
    assert (stats.num_steps, stats.step_s, stats.stalled_s) == (2, 200.0 + copies, copies)
    assert stats.last_step is not None
    assert stats.last_step.moved_to_host_bytes == stats.streamed_bytes
    assert 2 * stats.streamed_bytes <= stats.last_step.moved_to_target_bytes + stats.streamed_bytes
    assert stats.bound == ("link-bound" if copies > 0.05 * stats.step_s else "compute-bound")
