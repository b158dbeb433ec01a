"""The connection to a node: who is let in, and what crosses it unchanged."""

from __future__ import annotations

import socket
import threading
import time

import pytest
import torch
from comfyui_ferry.core.errors import WorkerError
from comfyui_ferry.core.workers.cluster.stream import Stream, write_payloads
from comfyui_ferry.core.workers.protocol import PayloadEncoder
from comfyui_ferry.core.workers.shared_memory import SharedFile


def connection() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = socket.create_connection(listener.getsockname())
        return listener.accept()[0], theirs


@pytest.fixture
def ends():
    made = [Stream(end) for end in connection()]
    yield made
    for end in made:
        end.close()


def test_payloads_and_their_tensors_arrive_as_they_were(ends):
    encoder = PayloadEncoder()
    shared = torch.randn(1000, 3).to(torch.bfloat16)
    values = [{"x": shared, "n": 1}, {"x": shared, "y": (torch.arange(7), b"bytes")}]
    contents = [encoder.encode(value, "payload") for value in values]
    ends[0].send({"kind": "call"}, contents, write_payloads(encoder))
    frame = ends[1].receive()
    assert frame.fields == {"kind": "call"}
    first, second = frame.decode(0), frame.decode(1)
    assert torch.equal(first["x"], shared)
    assert torch.equal(second["y"][0], torch.arange(7)) and second["y"][1] == b"bytes"
    ends[1].send({"kind": "done"})
    assert ends[0].receive().fields == {"kind": "done"}


def test_parts_of_a_file_are_received_into_their_place(ends):
    file = SharedFile.create("test", 1 << 20)
    file.map(writable=True).copy_(torch.randint(256, (1 << 20,), dtype=torch.uint8))
    place = torch.zeros(1 << 20, dtype=torch.uint8)
    sender = threading.Thread(target=ends[0].send_file, args=({"kind": "part"}, file, 4096, 1000))
    sender.start()
    ends[1].receive(lambda fields: place[4096:5096])
    sender.join()
    expected = torch.zeros_like(place)
    expected[4096:5096] = file.map(writable=True)[4096:5096]
    assert torch.equal(place, expected)


def test_what_is_no_frame_is_refused_and_an_end_is_an_end(ends):
    ends[0].connection.sendall(b"x" * 100)
    with pytest.raises(WorkerError, match="a frame of version"):
        ends[1].receive()
    ends[0].close()
    with pytest.raises(EOFError):
        while True:
            ends[1].connection.recv(100) or ends[1].receive()


def test_closing_wakes_who_waits(ends):
    woken = []

    def wait():
        try:
            ends[0].receive()
        except EOFError:
            woken.append(True)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.1)
    ends[0].close()
    thread.join(5)
    assert woken == [True]
