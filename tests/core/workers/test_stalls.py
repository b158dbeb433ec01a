"""Who hangs and who only waits, decided from what each rank was seen to do."""

from __future__ import annotations

import pytest
from comfyui_ferry.core.workers.activity import Activity
from comfyui_ferry.core.workers.calls import CallTable
from comfyui_ferry.core.workers.stalls import StallDetector

BUSY, WAITING, QUIET, STOPPED = Activity.BUSY, Activity.WAITING, Activity.QUIET, Activity.STOPPED
LIMIT_S = 3.0


class Seen:
    """A process that does what the test says."""

    used_s = 0.0

    def __init__(self, activity: Activity):
        self.activity = activity

    def look(self, elapsed_s: float, *, wanted: bool = True) -> Activity:
        return self.activity


def find(activities, calls, *, seconds=4, one_is_enough=False, progress=None):
    """Look every second; return the stall that was found, and after how many looks."""
    processes = {rank: Seen(activity) for rank, activity in enumerate(activities)}
    detector = StallDetector(
        processes, LIMIT_S, one_is_enough=one_is_enough, overdue_s=LIMIT_S, progress=progress
    )
    for second in range(1, seconds + 1):
        stall = detector.find(calls, elapsed_s=1, counted_s=1)
        if stall is not None:
            return stall, second
    return None


def calls(*ranks_of_each, job="forward"):
    table = CallTable()
    return [table.open(job, ranks, 60) for ranks in ranks_of_each]


def test_a_call_hangs_when_all_its_ranks_are_quiet():
    stall, second = find([QUIET, QUIET], calls([0, 1]))
    assert (stall.ranks, second) == ((0, 1), 4)  # the first look only begins the count
    assert stall.describe([1]) == "job 'forward' hangs: worker rank 1 was idle for 3 s"
    assert "worker ranks 0, 1 were idle" in stall.describe([0, 1])


def test_a_rank_that_waits_for_one_that_works_does_not():
    for other in (BUSY, WAITING):
        assert find([QUIET, other], calls([0, 1]), seconds=20) is None


def test_ranks_without_a_call_may_be_quiet():
    assert find([QUIET, QUIET], [], seconds=20) is None
    assert find([QUIET, BUSY], calls([1]), seconds=20) is None


def test_calls_that_share_a_rank_are_judged_together():
    """Ranks 0 and 1 wait for rank 2 in different ways."""
    assert find([QUIET, QUIET, BUSY], calls([0, 1], [1, 2]), seconds=20) is None
    assert find([QUIET, QUIET, BUSY], calls([0, 1], [2]))[0].ranks == (0, 1)


def test_where_waiting_shows_one_quiet_rank_is_enough_but_not_at_the_start():
    assert find([QUIET, BUSY], calls([0, 1]), one_is_enough=True)[0].ranks == (0,)
    assert find([QUIET, BUSY], calls([0, 1], job="start"), one_is_enough=True, seconds=20) is None


def test_a_stopped_rank_is_found_without_a_call():
    stall, second = find([BUSY, STOPPED], [])
    assert (stall.ranks, second) == ((1,), 3)
    assert "worker rank 1 was stopped by a signal (SIGSTOP)" in stall.describe(stall.ranks)


def test_a_new_call_starts_the_count_again():
    table = CallTable()
    detector = StallDetector({0: Seen(QUIET)}, LIMIT_S, one_is_enough=False)
    for _ in range(10):
        call = table.open("forward", [0], 60)
        for _ in range(3):
            assert detector.find([call], elapsed_s=1, counted_s=1) is None


def test_a_moment_in_which_nobody_could_look_counts_little():
    detector = StallDetector({0: Seen(QUIET)}, LIMIT_S, one_is_enough=False)
    pending = calls([0])
    for _ in range(3):
        assert detector.find(pending, elapsed_s=1000, counted_s=0.5) is None


def counts(until: int):
    """A rank that does one more part a look, and none any more after so many."""
    done = iter(range(1, until + 1))
    return lambda: next(done, until)


def overdue_calls():
    found = calls([0, 1])
    found[0].usual_s = 1.0
    return found


@pytest.mark.parametrize("first", [BUSY, QUIET])
def test_a_slow_rank_that_gets_on_is_no_fault_nor_are_those_that_wait_for_it(first, monkeypatch):
    """As with NCCL, where the host of each rank spins, or sleeps, while the slowest GPU computes."""
    monkeypatch.setattr(Seen, "used_s", 1.0)
    progress = {0: counts(40), 1: counts(40)}
    assert find([first, BUSY], overdue_calls(), seconds=40, one_is_enough=True, progress=progress) is None
    only_one_tells = {0: lambda: 0, 1: counts(40)}
    assert find([BUSY, BUSY], overdue_calls(), seconds=40, progress=only_one_tells) is None


def test_ranks_that_get_no_further_are_found_whatever_they_did_before(monkeypatch):
    monkeypatch.setattr(Seen, "used_s", 1.0)
    limit_s = LIMIT_S + 4 * 1.0
    for parts in (0, 10):
        stall, second = find(
            [BUSY, BUSY], overdue_calls(), seconds=40, progress={0: counts(parts), 1: counts(parts)}
        )
        assert stall.ranks == (0, 1)
        assert parts + limit_s <= second <= parts + limit_s + 1
    assert "rank 1 was computing for 7.0 s and got no further, which took 1 s at most" in stall.describe([1])


def compared(*activities, spent, waits=None, replied=(), seconds=20):
    """Ranks that do the same work in their first such call, and use so much of a core a second."""
    processes = {rank: Seen(activity) for rank, activity in enumerate(activities)}
    for rank, used_s in enumerate(spent):
        processes[rank].used_s = used_s
    says = {rank: lambda: False for rank in processes} | (waits or {})
    detector = StallDetector(processes, LIMIT_S, one_is_enough=True, overdue_s=LIMIT_S, waits=says)
    call = calls(list(processes))[0]
    call.same_work = True
    for second in range(1, seconds + 1):
        if (stall := detector.find([call], elapsed_s=1, counted_s=1)) is not None:
            return stall, second
        if second == 2:
            call.missing -= set(replied)
    return None


def test_a_rank_that_computes_on_while_others_wait_is_found_in_the_first_call():
    """They have replied, or say that they only wait, which their processor time does not show."""
    for others in ({"replied": (0,)}, {"waits": {0: lambda: True}}):
        stall, second = compared(BUSY, BUSY, spent=(1.0, 1.0), **others)
        assert stall.ranks == (1,), others
        assert second <= 1 + LIMIT_S + 2 * 1.0
        assert "'forward' does not end: worker rank 1 was computing for" in stall.describe([1])
        assert "while the others took" in stall.describe([1])


def test_ranks_that_all_compute_or_all_wait_are_not_told_from_a_long_call():
    assert compared(BUSY, BUSY, spent=(1.0, 1.0)) is None
    assert compared(BUSY, BUSY, spent=(1.0, 1.0), waits={0: lambda: True, 1: lambda: True}) is None
    # Uneven shares of one piece of work.
    assert compared(BUSY, BUSY, spent=(1.0, 0.4), replied=(0,), seconds=7) is None
