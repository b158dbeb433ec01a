"""The times are those of a clock that the test sets, so every figure is exact."""

from __future__ import annotations

import pytest
from comfyui_ferry.core.comfy_adapter.call_meter import CallMeter

pytestmark = [pytest.mark.comfy]


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def reply(busy_s: float, waited_s: float | None = 0.0, memory_bytes: int | None = None) -> dict:
    return {"busy_s": busy_s, "waited_s": waited_s, "memory_bytes": memory_bytes}


def test_calls_that_are_away_together_share_their_time():
    """CFG parallel: two calls in 2 s are 1 s an evaluation; the first pair warms up."""
    clock = Clock()
    meter = CallMeter(2, clock)
    for took_s in (50.0, 2.0, 2.0):
        first, second = meter.call(1), meter.call(1)
        first.__enter__()
        second.__enter__()
        clock.now_s += took_s
        meter.note({0: reply(took_s)})
        meter.note({1: reply(took_s)})
        second.__exit__(None, None, None)
        first.__exit__(None, None, None)
        clock.now_s += 7.0  # the sampler's own work is no evaluation
    assert meter.read().evaluation_s == 1.0


def test_a_call_of_a_batch_is_as_many_evaluations_and_one_that_failed_is_none():
    clock = Clock()
    meter = CallMeter(1, clock)
    for _ in range(2):
        with meter.call(4):
            clock.now_s += 2.0
    with pytest.raises(ValueError), meter.call(4):
        clock.now_s += 99.0
        raise ValueError
    assert meter.read().evaluation_s == 0.5
    meter.begin()
    assert meter.read().evaluation_s is None


def test_the_use_of_each_gpu_is_that_since_the_last_reading():
    clock = Clock()
    meter = CallMeter(2, clock)
    clock.now_s += 10.0
    meter.note({0: reply(8.0, 2.0, 5), 1: reply(4.0, 3.0, 6)})
    usage = meter.read()
    assert [(rank.computes, rank.waits, rank.memory_bytes) for rank in usage.ranks] == [
        (pytest.approx(0.6), pytest.approx(0.2), 5),
        (pytest.approx(0.1), pytest.approx(0.3), 6),
    ]
    assert usage.exchange_share == pytest.approx(5 / 12)
    clock.now_s += 4.0
    meter.note({0: reply(1.0, 0.0, 5)})
    idle = meter.read().ranks
    assert (idle[0].computes, idle[1].computes) == (pytest.approx(0.25), 0.0)


def test_what_cannot_be_seen_is_not_told():
    clock = Clock()
    meter = CallMeter(1, clock)
    meter.note({0: reply(1.0, None)})
    assert meter.read().exchange_share is None
    # The share is that of the calls which told; the waits of a time with others are not known.
    clock.now_s += 10.0
    meter.note({0: reply(2.0, 0.5)})
    meter.note({0: reply(3.0, None)})
    usage = meter.read()
    assert usage.exchange_share == 0.25
    assert usage.ranks[0].waits is None
    clock.now_s += 10.0
    meter.note({0: reply(2.0, 1.0)})
    assert meter.read().ranks[0].waits == pytest.approx(0.1)
