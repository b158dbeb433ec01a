"""What a node gets of shared files, and when: over real connections, with the agent's own code."""

from __future__ import annotations

import gc
import socket
import threading
import time

import pytest
import torch
from comfyui_ferry.core.errors import RequestError, WorkerError
from comfyui_ferry.core.workers import SharedArena, open_arena
from comfyui_ferry.core.workers.cluster import node_link
from comfyui_ferry.core.workers.cluster.file_copies import FileCopies
from comfyui_ferry.core.workers.cluster.node_files import NodeFiles
from comfyui_ferry.core.workers.cluster.node_link import NodeLink
from comfyui_ferry.core.workers.cluster.placement import Share
from comfyui_ferry.core.workers.cluster.stream import Stream


class Node:
    """A node's side of the files, in a thread."""

    def __init__(self, number: int, *, here: bool = False, available_bytes: int = 1 << 40):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            theirs = Stream(socket.create_connection(listener.getsockname()))
            share = Share(f"node{number}", "127.0.0.1", here, range(number, number + 1))
            self.link = NodeLink(number, share, Stream(listener.accept()[0]), ["cpu"], available_bytes)
        self.files = NodeFiles()
        self.delays_s: list[float] = []
        self.received: dict[str, int] = {"file": 0, "part": 0, "drop": 0}
        self.stream = theirs
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self):
        try:
            while True:
                fields = self.stream.receive(self.files.place).fields
                self.received[fields["kind"]] += fields.get("num_bytes", 1) if fields["kind"] == "part" else 1
                if fields["kind"] == "drop":
                    self.files.drop(fields["number"])
                elif fields["kind"] == "file" and fields["path"] is None:
                    self.files.make(fields["number"], fields["num_bytes"])
                elif fields["kind"] == "file":
                    opened = self.files.open(
                        fields["number"], fields["num_bytes"], fields["path"], fields["identity"]
                    )
                    time.sleep(self.delays_s.pop(0) if self.delays_s else 0)
                    answer = {"kind": "answer", "question": fields["question"], "shared": opened}
                    self.link.answers.put(answer)
                self.stream.send({"kind": "done"})
        except EOFError:
            pass

    def tensors(self, arena: SharedArena, number: int) -> dict[str, torch.Tensor]:
        (file,) = self.files.named([number])
        return open_arena(arena.handle() | {"file": file})

    def holds(self, arena: SharedArena, number: int) -> bool:
        until = time.monotonic() + 5
        while time.monotonic() < until:  # what was sent may not have been read yet
            found = self.tensors(arena, number) if number in self.files._files else {}
            if found and all(torch.equal(found[name], tensor) for name, tensor in arena.tensors.items()):
                return True
            time.sleep(0.02)
        return False


@pytest.fixture
def nodes():
    made = [Node(0), Node(1)]
    yield made
    for node in made:
        node.link.stream.close()


def bring(copies: FileCopies, nodes: list[Node], arena: SharedArena, poll=None) -> int:
    return copies.bring([arena.handle()["file"]], [node.link for node in nodes], poll)[0]


def test_a_file_goes_once_to_each_node_and_again_only_when_it_has_changed(nodes):
    copies = FileCopies([node.link for node in nodes])
    arena = SharedArena.create({"w": torch.randn(3_000_000), "b": torch.randn(5)})
    numbers = {bring(copies, nodes, arena) for _ in range(3)}
    (number,) = numbers
    assert all(node.holds(arena, number) for node in nodes)
    assert [node.received["part"] for node in nodes] == [arena.size_bytes] * 2
    arena.write("b", torch.ones(5))
    bring(copies, nodes, arena)
    assert all(node.holds(arena, number) for node in nodes)
    before = arena.size_bytes
    arena.add({"more": torch.randn(1000)})  # written behind what is there
    bring(copies, nodes, arena)
    assert all(node.holds(arena, number) for node in nodes)
    assert arena.size_bytes > before


def test_a_cancelled_sending_goes_on_where_it_stopped(nodes):
    copies = FileCopies([node.link for node in nodes])
    arena = SharedArena.create({"w": torch.randn(20_000_000)})
    polls = []

    def poll():
        polls.append(1)
        if len(polls) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bring(copies, nodes, arena, poll)
    number = bring(copies, nodes, arena)
    assert all(node.holds(arena, number) for node in nodes)
    assert [node.received["part"] for node in nodes] == [arena.size_bytes] * 2


def test_the_own_node_opens_the_file_itself():
    node = Node(0, here=True)
    arena = SharedArena.create({"w": torch.randn(1000)})
    copies = FileCopies([node.link])
    number = bring(copies, [node], arena)
    arena.write("w", torch.ones(1000))
    assert torch.equal(node.tensors(arena, number)["w"], torch.ones(1000))
    assert node.received["part"] == 0
    node.link.stream.close()


def test_a_file_at_the_same_path_that_is_another_one_is_not_used():
    files, arena = NodeFiles(), SharedArena.create({"w": torch.ones(10)})
    path = f"/proc/self/fd/{arena.handle()['file'].descriptor}"
    assert not files.open(0, arena.size_bytes, path, [1, 2])
    assert not files.open(0, arena.size_bytes, "/proc/self/fd/9999", [1, 2])


def test_nodes_let_go_of_what_this_process_has_let_go_of(nodes):
    copies = FileCopies([node.link for node in nodes])
    arena = SharedArena.create({"w": torch.ones(10)})
    bring(copies, nodes, arena)
    arena.close()
    del arena
    gc.collect()
    copies.drop_dead()
    until = time.monotonic() + 5
    while any(node.received["drop"] == 0 for node in nodes) and time.monotonic() < until:
        time.sleep(0.02)
    assert [node.received["drop"] for node in nodes] == [1, 1]


def test_a_node_without_room_is_refused_before_a_byte_is_sent(nodes):
    small = Node(2, available_bytes=1000)
    copies = FileCopies([node.link for node in [*nodes, small]])
    arena = SharedArena.create({"w": torch.randn(100_000)})
    with pytest.raises(RequestError, match=r"sent to node 127\.0\.0\.1.*of its host memory"):
        bring(copies, [*nodes, small], arena)
    assert [node.received["part"] for node in [*nodes, small]] == [0, 0, 0]
    small.link.stream.close()


def test_a_node_that_answers_too_late_is_told_and_its_answer_is_not_taken_for_another(monkeypatch):
    """Else a call would name a file that the node does not have."""
    monkeypatch.setattr(node_link, "_ANSWER_S", 0.3)
    node = Node(0, here=True)
    copies = FileCopies([node.link])
    arenas = [SharedArena.create({"w": torch.full((10,), float(number))}) for number in range(2)]
    node.delays_s = [0.6]
    with pytest.raises(WorkerError, match=r"node 127\.0\.0\.1 \(rank 0\) has not answered for 0\.3 s"):
        bring(copies, [node], arenas[0])
    # The second is a file that the node cannot open: the first one's answer, yes, comes meanwhile.
    monkeypatch.setattr(node.files, "open", lambda *_: False)
    monkeypatch.setattr(node_link, "_ANSWER_S", 5.0)
    number = bring(copies, [node], arenas[1])
    assert node.holds(arenas[1], number)
    node.link.stream.close()


def test_cancel_does_not_wait_for_a_node_that_does_not_answer():
    node = Node(0, here=True)
    node.delays_s = [5.0]
    polls = []

    def poll():
        polls.append(1)
        if len(polls) == 3:
            raise KeyboardInterrupt

    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        bring(FileCopies([node.link]), [node], SharedArena.create({"w": torch.ones(10)}), poll)
    assert time.monotonic() - begin < 2
    node.link.stream.close()
