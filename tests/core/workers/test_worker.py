from __future__ import annotations

import torch
from comfyui_ferry.core.workers import borrows_arguments
from comfyui_ferry.core.workers.worker import _BORROWS, _MAX_TRACEBACK_CHARS, _describe


def test_borrowing_is_a_mark_on_the_job():
    @borrows_arguments
    def job(value):
        return value

    assert getattr(job, _BORROWS)
    assert job(3) == 3


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
