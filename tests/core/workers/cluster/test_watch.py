"""What the watch makes of what nodes say; the nodes and Ray's process are played here."""

from __future__ import annotations

import socket
import threading
import time

import pytest
from comfyui_ferry.core.errors import WorkerError
from comfyui_ferry.core.workers import Deadlines
from comfyui_ferry.core.workers.calls import CallTable
from comfyui_ferry.core.workers.cluster import watch as watch_module
from comfyui_ferry.core.workers.cluster.node_link import NodeLink
from comfyui_ferry.core.workers.cluster.placement import Share
from comfyui_ferry.core.workers.cluster.stream import Stream
from comfyui_ferry.core.workers.cluster.watch import ClusterWatch

RAISED = (
    "worker rank 0 raised RuntimeError: Connection reset by peer. Running: 'x' on ranks [0].\nits traceback"
)
KILLED = "worker rank 1 was killed by SIGKILL. Running: 'x' on ranks [1].\nits log"


class Driver:
    """Ray's process, which says that every agent has ended once it is closed."""

    def __init__(self):
        self.closed = False
        self.said: list[dict] = []

    def events(self, timeout_s: float) -> list:
        return [self.said.pop(0)] if self.said else []

    def close(self) -> None:
        self.closed = True


class Played:
    """Two nodes with one rank each."""

    def __init__(self, **deadlines: float):
        self.links, self.agents = [], []
        for number in (0, 1):
            with socket.create_server(("127.0.0.1", 0)) as listener:
                self.agents.append(Stream(socket.create_connection(listener.getsockname())))
                share = Share(str(number), f"10.0.0.{number}", False, range(number, number + 1))
                self.links.append(NodeLink(number, share, Stream(listener.accept()[0]), ["cpu"], 0))
        self.calls, self.driver = CallTable(), Driver()
        limits = Deadlines(**{"stall_s": 0.3, "close_s": 0.1} | deadlines)
        self.watch = ClusterWatch(self.links, self.driver, self.calls, limits, lambda: None)
        self.watch.start()
        self.aborted = [threading.Event(), threading.Event()]
        for number in (0, 1):
            threading.Thread(target=self.serve, args=(number,), daemon=True).start()

    def serve(self, number: int) -> None:
        try:
            while True:
                if self.agents[number].receive().fields["kind"] == "abort":
                    self.aborted[number].set()
                    self.say(number, kind="lost", message=f"its stacks {number}")
        except EOFError:
            self.driver.said.append({"event": "ended", "agent": number, "error": None})

    def say(self, number: int, **fields) -> None:
        self.agents[number].send(fields)

    def idle(self, *seconds: float) -> None:
        for number, value in enumerate(seconds):
            self.say(number, kind="beat", available_bytes=0, idle_s={number: value})


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(watch_module, "_NEWS_S", 0.4)
    monkeypatch.setattr(watch_module, "_LATE_S", 0.2)


@pytest.fixture
def played():
    made = Played()
    yield made
    made.watch.close()
    for agent in made.agents:
        agent.close()


def test_a_lost_rank_is_blamed_and_not_the_one_that_waited_for_it(played):
    call = played.calls.open("x", [0, 1], 60)
    played.say(0, kind="lost", message=RAISED)
    time.sleep(0.3)
    played.say(1, kind="lost", message=KILLED)
    with pytest.raises(
        WorkerError, match=r"^node 10\.0\.0\.1 \(rank 1\): worker rank 1 was killed"
    ) as caught:
        call.wait()
    assert "its traceback" in str(caught.value) and "its log" in str(caught.value)
    assert played.driver.closed
    with pytest.raises(WorkerError, match=r"the pool is lost \(node 10\.0\.0\.1"):
        played.calls.open("y", [0], 1)


def test_a_call_hangs_once_the_ranks_of_all_nodes_do_nothing(played):
    call = played.calls.open("x", [0, 1], 60)
    played.idle(9.0, 0.0)  # the first waits for the second
    time.sleep(1.0)
    assert not call.done
    played.idle(9.0, 9.0)
    with pytest.raises(
        WorkerError, match=r"^job 'x' hangs: worker ranks 0, 1 were idle for 0\.3 s"
    ) as caught:
        call.wait()
    assert "its stacks 0" in str(caught.value) and "its stacks 1" in str(caught.value)


def test_what_was_said_before_a_call_does_not_count(played):
    played.idle(9.0, 9.0)
    time.sleep(0.2)
    call = played.calls.open("x", [0, 1], 60)
    time.sleep(0.2)
    played.idle(0.0, 0.0)
    time.sleep(0.8)
    assert not call.done


def test_a_late_call_says_what_its_ranks_were_doing():
    played = Played()
    call = played.calls.open("x", [0, 1], 0.1)
    played.agents[1].send({"kind": "result", "call": call.number, "ranks": [1]}, [b"1"])
    with pytest.raises(WorkerError, match=r"'x' had no reply from rank 0 within.*(?s:.)*its stacks 0"):
        call.wait()
    assert played.aborted[0].is_set()


def test_an_answer_for_a_rank_of_another_node_ends_the_pool(played):
    call = played.calls.open("x", [0, 1], 60)
    played.agents[0].send({"kind": "result", "call": call.number, "ranks": [1]}, [b"1"])
    with pytest.raises(WorkerError, match="answered for rank 1"):
        call.wait()


def test_a_silent_node_is_given_up():
    played = Played(heartbeat_s=0.8)
    call = played.calls.open("x", [0, 1], 60)
    with pytest.raises(WorkerError, match=r"has said nothing for"):
        call.wait()
