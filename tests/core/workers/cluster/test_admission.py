"""Who is let in: agents that know the secret, whatever crowd of strangers stands at the port."""

from __future__ import annotations

import os
import socket
import threading
import time

import pytest
from comfyui_ferry.core.errors import WorkerError
from comfyui_ferry.core.workers.cluster import admission as admission_module
from comfyui_ferry.core.workers.cluster.admission import Admission
from comfyui_ferry.core.workers.cluster.agent import connect
from comfyui_ferry.core.workers.cluster.handshake import introduce
from comfyui_ferry.core.workers.cluster.stream import Stream

SECRET = os.urandom(32)


class GaveUp(Exception):
    pass


def admitted(act, *, count: int = 1, within_s: float = 10.0) -> list[Stream]:
    """Take agents while ``act`` is called, in a thread, with the address."""
    until = time.monotonic() + within_s

    def check(missing: int) -> None:
        if time.monotonic() > until:
            raise GaveUp

    with socket.create_server(("127.0.0.1", 0), backlog=512) as listener:
        thread = threading.Thread(target=act, args=(listener.getsockname(),))
        thread.start()
        try:
            return Admission(SECRET, count).run(listener, check)
        finally:
            listener.close()
            thread.join(15)


def test_agents_with_the_secret_are_let_in_in_their_order_and_know_their_parent():
    made = []
    streams = admitted(lambda at: made.extend(connect(*at, SECRET, number) for number in (2, 0, 1)), count=3)
    for number, stream in enumerate(streams):
        stream.send({"kind": "you", "number": number})
    assert [end.receive().fields["number"] for end in made] == [2, 0, 1]


STRANGERS = ("wrong secret", "garbage", "nothing", "hangs up", "echo", "no such agent", "twice")


def turned_away(what: str, end: socket.socket) -> bool:
    """Do what a stranger does; return whether the other end then ends the connection."""
    if what == "wrong secret":
        with pytest.raises((OSError, EOFError)):
            introduce(end, b"x" * 32, 0)
    elif what == "garbage":
        end.sendall(b"GET / HTTP/1.1\r\n" * 20)
    elif what == "echo":  # the proof of one side must not do for the other
        end.sendall(b"FRRC\1\0\0\0" + (nonce := end.recv(32)) + nonce)
    elif what in ("no such agent", "twice"):
        introduce(end, SECRET, {"no such agent": 2, "twice": 0}[what])
    elif what == "hangs up":
        end.close()
        return True
    end.settimeout(5)
    try:
        while end.recv(64):
            pass
    except ConnectionResetError:
        pass
    return True


def test_strangers_are_turned_away(monkeypatch):
    monkeypatch.setattr(admission_module, "HANDSHAKE_S", 0.3)
    told = {}

    def act(at) -> None:
        connect(*at, SECRET, 0)
        for what in STRANGERS:
            begin = time.monotonic()
            with socket.create_connection(at) as end:
                told[what] = turned_away(what, end) and time.monotonic() - begin < 1

    with pytest.raises(GaveUp):
        admitted(act, count=2, within_s=1.5)
    assert told == dict.fromkeys(STRANGERS, True)


def test_an_agent_passes_through_a_crowd_that_costs_no_threads_and_few_descriptors(monkeypatch):
    monkeypatch.setattr(admission_module, "_MOST_UNPROVEN", 20)
    most = {"threads": 0, "files": 0}
    before = {"threads": threading.active_count(), "files": len(os.listdir("/proc/self/fd"))}

    def act(at) -> None:
        strangers = []
        for number in range(400):
            strangers.append(socket.create_connection(at))
            if number % 3 == 0:
                strangers[-1].sendall(b"FRRC")
        most["threads"] = threading.active_count() - before["threads"] - 1
        most["files"] = len(os.listdir("/proc/self/fd")) - before["files"] - len(strangers)
        connect(*at, SECRET, 0).send({"kind": "here"})
        for stranger in strangers:
            stranger.close()

    begin = time.monotonic()
    (stream,) = admitted(act)
    assert stream.receive().fields == {"kind": "here"}
    assert time.monotonic() - begin < 5
    assert most["threads"] == 0
    assert most["files"] < 30


def test_an_agent_does_not_trust_a_parent_without_the_secret():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = socket.create_connection(listener.getsockname())
        ours = listener.accept()[0]
    with ours, theirs:
        ours.sendall(b"n" * 32 + b"p" * 32)
        with pytest.raises(WorkerError, match="does not know this pool's secret"):
            introduce(theirs, SECRET, 0)
