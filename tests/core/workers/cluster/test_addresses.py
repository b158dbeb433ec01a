"""Which addresses are taken; the processes of this machine are a planted folder."""

from __future__ import annotations

import importlib.util
import os
import socket
from pathlib import Path

import pytest
from comfyui_ferry.core.errors import RequestError
from comfyui_ferry.core.workers import ClusterPool, ClusterSpec, check_address
from comfyui_ferry.core.workers.cluster.addresses import find_cluster
from ferry_support.worker_specs import cpu_spec


@pytest.fixture
def proc(tmp_path: Path):
    """A proc file system with these raylets, and processes that only look like one."""

    def plant(*heads: str, user: int | None = None) -> Path:
        user = os.getuid() if user is None else user
        commands = [["/x/ray/raylet", "--a=b", f"--gcs-address={head}"] for head in heads]
        commands += [["/bin/sh", "-c", "raylet", "--gcs-address=203.0.113.9:6379"], []]
        for number, words in enumerate(commands):
            folder = tmp_path / str(100 + number)
            folder.mkdir()
            (folder / "cmdline").write_bytes("\0".join(words).encode())
            (folder / "status").write_text(f"Name:\traylet\nUid:\t{user}\t{user}\t{user}\t{user}\nGid:\t0\n")
        (tmp_path / "sys").mkdir()
        (tmp_path / "99").mkdir()  # ended meanwhile
        return tmp_path

    return plant


@pytest.fixture
def head():
    """Something that answers, like the head of a cluster."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize(
    "address", ["", "somewhere", "ray://10.0.0.1:10001", "10.0.0.1", "10.0.0.1:port", "10.0.0.1:0", ":6379"]
)
def test_what_is_no_address_is_refused(address):
    with pytest.raises(RequestError, match=r"ray_address=.*host:port as"):
        ClusterPool.start(cpu_spec(2), ClusterSpec(address))


def test_without_ray_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RequestError, match=r"Ray is not installed.*comfyui-ferry\[cluster\]"):
        check_address("auto")


def test_a_cluster_of_strangers_is_refused_and_not_contacted(proc, monkeypatch):
    """A workflow may bring any address along."""
    monkeypatch.setattr(socket, "create_connection", lambda *_, **__: pytest.fail("it was contacted"))
    root = proc("198.51.100.1:6379")
    for address in ("203.0.113.9:6379", "198.51.100.1:6380", "no.such.host.invalid:6379"):
        with pytest.raises(
            RequestError, match=r"not a node of that cluster.*198\.51\.100\.1:6379.*ray start"
        ):
            find_cluster(address, root)


@pytest.mark.parametrize("name", ["auto", "127.0.0.1", "localhost"])
def test_the_cluster_of_this_machine_is_found_by_any_of_its_names(proc, head, name):
    address = name if name == "auto" else f"{name}:{head.rpartition(':')[2]}"
    assert find_cluster(address, proc(head, head)) == head


def test_auto_is_refused_when_it_is_not_clear(proc, head, tmp_path):
    with pytest.raises(RequestError, match=r"not a node.*none"):
        find_cluster("auto", proc())


def test_of_several_clusters_one_must_be_named(proc, head):
    root = proc(head, "198.51.100.1:6379")
    with pytest.raises(RequestError, match=r"several clusters.*198\.51\.100\.1:6379.*Name the one"):
        find_cluster("auto", root)
    assert find_cluster(head, root) == head


def test_a_head_that_does_not_answer_is_refused(proc):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        gone = f"127.0.0.1:{listener.getsockname()[1]}"
    with pytest.raises(RequestError, match=r"does not answer.*ray start --head"):
        find_cluster(gone, proc(gone))


def test_a_node_of_another_user_of_the_machine_leads_nowhere(proc, monkeypatch):
    """He could start one, and a workflow that names his cluster, or `auto`, would hand him what is made."""
    monkeypatch.setattr(socket, "create_connection", lambda *_, **__: pytest.fail("it was contacted"))
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    root = proc("198.51.100.1:6379", user=1001)
    for address in ("auto", "198.51.100.1:6379"):
        with pytest.raises(
            RequestError, match=r"not a node of that cluster.*none.*as ComfyUI's user or root"
        ):
            find_cluster(address, root)
