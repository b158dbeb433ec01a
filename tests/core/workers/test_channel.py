from __future__ import annotations

import os
import socket
import time

import pytest
import torch
from comfyui_ferry.core.errors import WorkerError
from comfyui_ferry.core.workers import channel
from comfyui_ferry.core.workers.channel import INLINE_LIMIT_BYTES, Link, Outgoing, connect
from comfyui_ferry.core.workers.protocol import PayloadEncoder
from comfyui_ferry.core.workers.shared_memory import BufferLender, SharedFile


@pytest.fixture
def links():
    ours, theirs = connect()
    pair = Link(ours, BufferLender(), writable=True), Link(theirs, BufferLender(), writable=False)
    yield pair
    for link in pair:
        link.close()


def outgoing(link: Link, *values) -> Outgoing:
    encoder = PayloadEncoder()
    return Outgoing(encoder, [encoder.encode(value, "payload") for value in values], link.lender)


def test_fields_and_payload_arrive(links):
    left, right = links
    left.send({"kind": "call", "call": 3}, outgoing(left, {"x": torch.arange(5), "y": "text"}))
    message = right.receive()
    assert message.fields == {"kind": "call", "call": 3}
    payload = message.decode()
    assert torch.equal(payload["x"], torch.arange(5))
    assert payload["y"] == "text"
    assert right.receive() is None


def test_messages_arrive_in_order_and_unmixed(links):
    left, right = links
    for number in range(20):
        left.send({"n": number}, outgoing(left, torch.full((3,), number)) if number % 2 else None)
    for number in range(20):
        message = right.receive()
        assert message.fields == {"n": number}
        if number % 2:
            assert message.decode().tolist() == [number] * 3


def test_large_content_travels_in_shared_memory(links):
    left, right = links
    values = [["x" * 100] * 5000, ["y" * 100] * 5000]
    out = outgoing(left, *values)
    assert max(map(len, out.contents)) <= INLINE_LIMIT_BYTES
    for index in range(2):
        left.send({}, out, index)
    assert [right.receive().decode(), right.receive().decode()] == values


def test_a_stream_of_messages_reuses_one_buffer_and_sends_its_descriptor_once(links):
    left, right = links
    numbers, descriptors = set(), len(os.listdir("/proc/self/fd"))
    for step in range(200):
        left.send({}, outgoing(left, torch.full((1000,), step)))
        message = right.receive()
        numbers.add(message.buffer_number)
        assert message.decode()[0] == step
        right.finish(message)
        right.send({})
        left.receive()
    assert len(numbers) == 1
    # The file and a mapping's own duplicate on each side: 3 for the one buffer.
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 3


def test_a_buffer_still_in_use_is_not_overwritten(links):
    left, right = links
    left.send({}, outgoing(left, torch.full((10,), 1)))
    first = right.receive()
    held = first.decode(copy=False)
    left.send({}, outgoing(left, torch.full((10,), 2)))
    assert right.receive().decode()[0] == 2
    assert held[0] == 1


def test_a_taken_payload_stays_in_the_buffer_until_it_is_gone(links):
    left, right = links
    right.send({}, outgoing(right, {"x": torch.full((30_000,), 1), "y": [torch.ones(3)]}))
    message = left.receive()
    taken = left.take(message)
    left.finish(message)  # says nothing more
    part = taken["x"][5:]
    del taken, message
    left.send({})
    right.receive()
    right.send({}, outgoing(right, torch.full((30_000,), 2)))
    other = left.take(left.receive())
    assert part.sum() == 29_995 and other.sum() == 60_000
    part += 1  # nobody else reads it
    assert len(right.lender.numbers()) == 2
    del part
    left.send({})
    right.receive()
    assert len(right.lender._free) == 1
    del other
    left.send({})
    right.receive()
    assert not right.lender._lent
    left.send({}, outgoing(left, torch.ones(4)))  # small: copied, also where buffers are mapped read-only
    small = right.take(right.receive())
    right.send({})
    left.receive()
    assert not left.lender._lent and small.sum() == 4


def test_outgrown_buffers_are_unmapped_on_the_other_side(links):
    left, right = links
    for exponent in range(16, 24):
        left.send({}, outgoing(left, torch.zeros(1 << exponent, dtype=torch.uint8)))
        right.finish(right.receive())
        right.send({})
        left.receive()
    assert len(left.lender.numbers()) == 1
    left.send({})
    right.receive()
    assert set(right._map._views) == left.lender.numbers()


def test_a_shared_file_arrives_as_the_same_memory(links):
    left, right = links
    file = SharedFile.create("test", 4096)
    left.send({}, outgoing(left, {"file": file, "x": torch.ones(3)}))
    received = right.receive().decode()["file"]
    assert received.descriptor != file.descriptor
    file.map(writable=True)[5] = 9
    assert received.map(writable=False)[5] == 9
    assert not os.get_inheritable(received.descriptor)


def test_too_many_files_are_refused_before_a_buffer_is_lent(links):
    left, _ = links
    files = [SharedFile.create("test", 64) for _ in range(channel.MAX_FILES)]
    with pytest.raises(ValueError, match="limit is 249"):
        outgoing(left, [*files, torch.ones(1)])
    assert left.lender.numbers() == set()


def test_a_failed_copy_gives_the_buffer_back(links, monkeypatch):
    left, _ = links

    def fail(*args):
        raise MemoryError

    monkeypatch.setattr(PayloadEncoder, "write_into", fail)
    with pytest.raises(MemoryError):
        outgoing(left, torch.ones(1), torch.ones(1))
    assert left.lender._lent == {}


def test_the_end_of_the_other_side_is_an_end_of_file_after_its_last_message(links):
    left, right = links
    left.send({"last": True})
    left.close()
    assert right.receive().fields == {"last": True}
    with pytest.raises(EOFError):
        right.receive()
    with pytest.raises(OSError):
        right.send({})


def test_a_receiver_that_does_not_read_is_an_error_not_a_hang(links, monkeypatch):
    monkeypatch.setattr(channel, "_SEND_TIMEOUT_S", 0.2)
    left, _ = links
    begin = time.monotonic()
    with pytest.raises(TimeoutError, match="has not read"):
        for _ in range(10_000):
            left.send({"filler": "x" * 1000})
    assert time.monotonic() - begin < 5


def test_another_version_of_the_protocol_is_refused(links, monkeypatch):
    left, right = links
    monkeypatch.setattr(channel, "PROTOCOL_VERSION", 99)
    left.send({})
    monkeypatch.undo()
    with pytest.raises(WorkerError, match=r"version 99.*Restart ComfyUI"):
        right.receive()


def test_the_pair_is_not_inherited_by_other_programs():
    ours, theirs = connect()
    with ours, theirs:
        assert ours.type & socket.SOCK_SEQPACKET
        assert not ours.get_inheritable()
        assert not theirs.get_inheritable()
