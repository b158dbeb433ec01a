from __future__ import annotations

import time

import torch
import torch.distributed as dist
from comfyui_ferry.core.parallel import ExchangeTimer
from comfyui_ferry.core.parallel.attention.ring import ring_attention
from comfyui_ferry.core.parallel.collectives import all_gather, all_reduce, all_to_all
from ferry_support.parity import world_group
from ferry_support.ranks import run_ranks

LATE_S = 0.3


def _wait_for_the_late_one() -> dict[str, float | None]:
    rank, group, found = dist.get_rank(), world_group(), {}
    ones = torch.ones(2)
    calls = {
        "all_reduce": lambda: all_reduce(ones, group=group),
        "all_gather": lambda: all_gather(ones, [2, 2], group=group),
        "all_to_all": lambda: all_to_all(ones, [1, 1], receive_sizes=[1, 1], group=group),
        "ring": lambda: ring_attention(
            *torch.ones(3, 1, 1, 2, 4), chunk_sizes=(2, 2), mask=None, scale=None, group=group
        ),
    }
    for name, call in calls.items():
        call()  # so that both start the next one together, connections made
        timer = ExchangeTimer()
        with timer.active():
            time.sleep(LATE_S * rank)
            call()
        call()  # no longer counted
        found[name] = timer.seconds()
    unused = ExchangeTimer()
    with unused.active():
        ones.sum()
    return found | {"nothing": unused.seconds()}


def test_waits_for_other_ranks_are_counted_and_nothing_else() -> None:
    on_time, late = run_ranks(_wait_for_the_late_one, 2)
    assert on_time.pop("nothing") is None
    assert late.pop("nothing") is None
    # A busy machine may hold up the punctual rank too, and so shorten its wait, but not by this much.
    assert all(seconds > 0.2 * LATE_S for seconds in on_time.values()), on_time
    assert all(seconds is not None for seconds in late.values())
