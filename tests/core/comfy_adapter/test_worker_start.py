"""Workers start while the weights are brought to where they will look for them."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

pytestmark = [pytest.mark.comfy, pytest.mark.timeout(60)]


class Pool:
    closed = False

    def close(self) -> None:
        self.closed = True


def start_while(monkeypatch: Any, meanwhile: Any, start: Any) -> Any:
    from comfyui_ferry.core.comfy_adapter import worker_start

    monkeypatch.setattr(worker_start, "start_pool", lambda devices, **how: start(how["poll"]))
    return worker_start.start_pool_while(meanwhile, ("cpu",), again=False)


def test_both_go_on_at_once(monkeypatch):
    pool, shared, started = Pool(), threading.Event(), threading.Event()

    def share():
        shared.set()
        assert started.wait(10)

    def start(poll):
        started.set()
        assert shared.wait(10)
        return pool

    assert start_while(monkeypatch, share, start) is pool
    assert not pool.closed


@pytest.mark.parametrize("too_late", [False, True])
def test_without_weights_no_workers(monkeypatch, too_late):
    pool = Pool()

    def share():
        raise MemoryError("no room")

    def start(poll):
        until = time.monotonic() + 10
        while not too_late and time.monotonic() < until:
            poll()
            time.sleep(0.01)
        return pool

    with pytest.raises(MemoryError, match="no room"):
        start_while(monkeypatch, share, start)
    assert pool.closed == too_late


def test_what_ends_the_start_is_told_once_the_weights_are_there(monkeypatch):
    class Cancelled(BaseException):
        pass

    def start(poll):
        raise Cancelled

    done = []
    with pytest.raises(Cancelled):
        start_while(monkeypatch, lambda: done.append(True), start)
    assert done == [True]
