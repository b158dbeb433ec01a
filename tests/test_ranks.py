"""The multi-rank runner must be able to fail, or no test that uses it can."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist
from ferry_support.ranks import RankError, results_of, run_named_ranks, run_ranks


def test_results_come_back_in_rank_order() -> None:
    def rank(offset: int) -> torch.Tensor:
        total = torch.tensor([float(dist.get_rank())])
        dist.all_reduce(total)
        return total + offset + dist.get_rank()

    assert run_ranks(rank, 3, 10) == [13.0, 14.0, 15.0]


def test_an_error_names_its_rank_and_shows_its_traceback() -> None:
    def rank() -> None:
        if dist.get_rank() == 1:
            raise ZeroDivisionError("only here")
        dist.barrier()

    with pytest.raises(RankError, match=r"(?s)rank 1 of 2 raised.*test_ranks.py.*only here"):
        run_ranks(rank, 2)


def test_of_two_errors_the_earlier_is_the_cause() -> None:
    lost_its_peer = ("raised", "Connection reset by peer", 2.0)
    with pytest.raises(RankError, match=r"(?s)rank 1 of 3 raised.*cause"):
        results_of([lost_its_peer, ("raised", "cause", 1.0), ("done", None, 0.5)])


def test_a_rank_that_dies_is_reported() -> None:
    def rank() -> None:
        if dist.get_rank() == 1:
            os._exit(3)

    with pytest.raises(RankError, match="rank"):
        run_ranks(rank, 2, timeout_s=20)


def test_a_rank_that_hangs_ends_at_the_deadline() -> None:
    started = time.monotonic()
    with pytest.raises(RankError, match="no answer within 1 s"):
        run_ranks(lambda: time.sleep(60), 2, timeout_s=1)
    assert time.monotonic() - started < 20


def test_fresh_interpreters_report_their_errors() -> None:
    with pytest.raises(RankError, match=r"(?s)rank . of 2 raised.*has no attribute 'nothing'"):
        run_named_ranks("ferry_support.toy_model:nothing", 2, backend="gloo", timeout_s=60)
