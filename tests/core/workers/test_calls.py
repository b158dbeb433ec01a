from __future__ import annotations

import threading
import time

import pytest
from comfyui_ferry.core.errors import WorkerError
from comfyui_ferry.core.workers.calls import CallTable


class Stop(BaseException):
    pass


def test_a_call_is_over_with_its_last_reply():
    table = CallTable()
    call = table.open("job", [2, 0], 10)
    table.deliver(call, 0, "zero")
    assert not call.done
    threading.Timer(0.1, table.deliver, (call, 2, "two")).start()
    assert list(call.wait().items()) == [(2, "two"), (0, "zero")]
    assert table.running() == []


def test_what_poll_raises_abandons_the_call_and_its_late_reply_is_dropped():
    table = CallTable()
    call = table.open("job", [0], 10)
    polls = []

    def poll():
        polls.append(1)
        if len(polls) == 3:
            raise Stop

    with pytest.raises(Stop):
        call.wait(poll=poll, poll_interval_s=0.01)
    assert table.running() == [call]
    table.deliver(call, 0, "late")
    assert table.running() == []
    with pytest.raises(WorkerError, match="abandoned"):
        call.wait()


def test_poll_comes_before_a_result_that_is_already_there():
    table = CallTable()
    call = table.open("job", [0], 10)
    table.deliver(call, 0, "there")

    def poll():
        raise Stop

    with pytest.raises(Stop):
        call.wait(poll=poll)


def test_failure_ends_every_open_call_each_with_its_own_exception():
    table = CallTable()
    calls = [table.open("job", [rank], 10) for rank in range(2)]
    table.refuse("the pool is lost (first).")
    table.refuse("second.")
    table.fail("everything is lost")
    errors = []
    for call in calls:
        with pytest.raises(WorkerError, match="everything is lost") as caught:
            call.wait()
        errors.append(caught.value)
    assert errors[0] is not errors[1]
    with pytest.raises(WorkerError, match=r"'other' cannot run: the pool is lost \(first\)"):
        table.open("other", [0], 10)


def test_a_call_is_late_after_its_deadline_abandoned_or_not():
    table = CallTable()
    call = table.open("job", [0], 1)
    table.open("other", [1], 100)
    call.abandon()
    assert table.late(time.monotonic()) is None
    assert table.late(time.monotonic() + 2) is call


def test_calls_are_compared_by_their_longest_part(monkeypatch):
    """And by the whole of it where nothing is known of its parts."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    table = CallTable()

    def run(alike: str, parts: list[float]) -> float | None:
        call = table.open("job", [0], 100)
        table.compare(call, alike)
        for seconds in parts[:-1]:
            now[0] += seconds
            call.note_progress()
        now[0] += parts[-1]
        table.deliver(call, 0, None)
        return call.usual_s

    assert [run("marks", [1, 3, 2]) for _ in range(4)] == [None, None, None, 3]
    assert [run("none", [6]) for _ in range(4)] == [None, None, None, 6]
