"""A node's part of a cluster pool: starts the ranks of this node and passes messages on to them.

Runs in a process that Ray started. The ranks are an ordinary ``WorkerPool``: one shared host copy of the
weights, the same watch over stopped and dead processes, and the same end with their parent. Everything
comes over one connection to the parent; when that ends, for whatever reason, so do the ranks.
"""

from __future__ import annotations

import concurrent.futures
import datetime
import json
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ...errors import FerryError, WorkerError
from ..host_memory import available_host_bytes
from ..pool import WorkerPool
from ..protocol import PayloadEncoder
from ..spec import PACK_ROOT, Deadlines, RankSpan, WorkerSpec
from .fingerprint import boot_id, fingerprint, interface_of
from .handshake import introduce
from .node_files import NodeFiles
from .stream import Frame, Stream, write_payloads

_CONNECT_S = 10.0
_AGAIN_S = 0.05
_BEAT_S = 0.5
_MOST_CALLS = 64


def describe(request: str) -> str:
    """Return, as JSON, what this node is: versions, GPUs given by Ray, folders, free memory.

    Args:
        request: JSON with ``address`` (of this node), ``on_gpu``, ``paths`` (each a folder of the parent's
            and the variable that says where it is here, or None) and ``files`` (by name: the index of a
            path and a file in it).
    """
    asked = json.loads(request)
    paths = [os.environ.get(variable or "") or path for path, variable in asked["paths"]]
    for path, (_, variable) in zip(paths, asked["paths"], strict=True):
        if not os.path.isdir(path):
            hint = f"; set {variable} where `ray start` runs" if variable else ""
            return json.dumps({"problem": f"there is no folder {path}{hint}"})
    files = {name: Path(paths[index], relative) for name, (index, relative) in asked["files"].items()}
    return json.dumps(
        {
            "fingerprint": fingerprint(PACK_ROOT, files),
            "boot_id": boot_id(),
            "devices": _devices() if asked["on_gpu"] else [],
            "interface": interface_of(asked["address"]),
            "paths": paths,
            "available_bytes": available_host_bytes(),
        }
    )


def serve(request: str) -> None:
    """Connect to the parent and serve it until the connection ends.

    Args:
        request: JSON with ``host``, ``port``, ``secret`` (hexadecimal), ``number`` and ``address``.
    """
    asked = json.loads(request)
    stream = connect(asked["host"], asked["port"], bytes.fromhex(asked["secret"]), asked["number"])
    _Service(stream, asked["address"]).run()


def connect(host: str, port: int, secret: bytes, number: int) -> Stream:
    """Return the connection to the parent at ``host:port``.

    A connection that ends before the parent has proved itself is tried again: a crowd of strangers at the
    same port may have pushed it out.

    Raises:
        WorkerError: If what answers there does not know the secret.
        OSError: If nothing answers there.
        EOFError: If every connection ended.
    """
    until = time.monotonic() + _CONNECT_S
    while True:
        connection = socket.create_connection((host, port), timeout=_CONNECT_S)
        try:
            return introduce(connection, secret, number)
        except WorkerError:
            connection.close()
            raise
        except (OSError, EOFError):
            connection.close()
            if time.monotonic() > until:
                raise
        time.sleep(_AGAIN_S)


def _devices() -> list[str]:
    """Return the UUIDs of the GPUs that Ray gave this process."""
    found = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    return [f"GPU-{torch.cuda.get_device_properties(index).uuid}" for index in found]


class _ParentGoneError(Exception):
    """The connection ended while the ranks were starting."""


class _Service:
    """Serves one connection."""

    def __init__(self, stream: Stream, address: str) -> None:
        self.stream = stream
        self.address = address
        self.files = NodeFiles()
        self.pool: WorkerPool | None = None
        self.store: dist.TCPStore | None = None
        self.over = threading.Event()
        self.lost = False
        self.waiting = concurrent.futures.ThreadPoolExecutor(_MOST_CALLS, "ferry-reply")

    def run(self) -> None:
        """Return once the parent says stop or is gone; no rank is left then."""
        beat = threading.Thread(target=self._beat, name="ferry-beat", daemon=True)
        beat.start()
        try:
            while (frame := self.stream.receive(self.files.place)).fields["kind"] != "stop":
                getattr(self, f"_on_{frame.fields['kind']}")(frame)
        except EOFError:
            pass
        finally:
            self.over.set()
            self.waiting.shutdown(wait=False)
            if self.pool is not None:
                self.pool.close()
            self.waiting.shutdown(wait=True)
            self.stream.close()
            beat.join()
            self.files.close()

    def _on_store(self, frame: Frame) -> None:
        """Open the store in which all ranks meet, on the address of this node alone."""
        listener = socket.create_server((self.address, 0), backlog=256)
        port = listener.getsockname()[1]
        self.store = dist.TCPStore(
            self.address,
            port,
            frame.fields["world_size"],
            is_master=True,
            timeout=datetime.timedelta(seconds=frame.fields["timeout_s"]),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        answer = {"kind": "answer", "question": frame.fields["question"]}
        self.stream.send(answer | {"store": f"{self.address}:{port}"})

    def _on_start(self, frame: Frame) -> None:
        self.waiting.submit(self._start, frame)

    def _on_file(self, frame: Frame) -> None:
        fields = frame.fields
        if fields["path"] is None:
            self.files.make(fields["number"], fields["num_bytes"])
            return
        shared = self.files.open(fields["number"], fields["num_bytes"], fields["path"], fields["identity"])
        self.stream.send({"kind": "answer", "question": fields["question"], "shared": shared})

    def _on_part(self, frame: Frame) -> None:
        """Nothing is left to do: the bytes were received into their place."""

    def _on_abort(self, frame: Frame) -> None:
        """End the ranks of this node with what they were doing, because the parent gave the pool up."""
        if self.pool is not None:
            self.pool.abort(frame.fields["cause"])
            if not self.pool.busy:
                self._say_lost("no call was under way here")

    def _on_drop(self, frame: Frame) -> None:
        self.files.drop(frame.fields["number"])

    def _on_call(self, frame: Frame) -> None:
        if self.pool is None:
            return
        fields = frame.fields
        files = self.files.named(fields["files"])
        values = [frame.decode(index, files=files) for index in range(len(frame.contents))]
        payloads = {rank: values[index] for rank, index in fields["ranks"]}
        try:
            call = self.pool.submit(fields["job"], payloads_by_rank=payloads, deadline_s=fields["deadline_s"])
        except FerryError as error:
            self._say_lost(str(error))
            return
        self.waiting.submit(self._reply, fields["call"], call.wait)

    def _start(self, frame: Frame) -> None:
        def results() -> dict[int, Any]:
            self.pool = WorkerPool.start(_spec(frame.decode()), poll=self._check_parent)
            return dict.fromkeys(self.pool.ranks, self.pool.jobs)

        self._reply(frame.fields["call"], results)
        if self.over.is_set() and self.pool is not None:  # it was too late to be cancelled
            self.pool.close()

    def _check_parent(self) -> None:
        if self.over.is_set():
            raise _ParentGoneError

    def _reply(self, number: int, get_results: Any) -> None:
        try:
            results = get_results()
            encoder = PayloadEncoder()
            contents = [encoder.encode(result, "the result") for result in results.values()]
            fields = {"kind": "result", "call": number, "ranks": list(results)}
            self.stream.send(fields, contents, write_payloads(encoder))
        except (OSError, _ParentGoneError):
            return  # nobody is left to be told
        except Exception as error:  # noqa: BLE001 - the process boundary; the parent is told
            self._say_lost(
                str(error) if isinstance(error, FerryError) else f"{type(error).__name__}: {error}"
            )

    def _say_lost(self, message: str) -> None:
        if not self.lost and not self.over.is_set():
            self.lost = True
            try:
                self.stream.send({"kind": "lost", "message": message})
            except OSError:
                return

    def _beat(self) -> None:
        while not self.over.wait(_BEAT_S):
            pool = self.pool
            try:
                idle_s = {} if pool is None else pool.idle_s
                beat = {"kind": "beat", "available_bytes": available_host_bytes(), "idle_s": idle_s}
                self.stream.send(beat)
                if pool is not None and not pool.alive and not pool.busy:
                    self._say_lost(pool.ended_because or "its workers ended between two calls")
            except OSError:
                return


def _spec(asked: dict[str, Any]) -> WorkerSpec:
    """Return the spec of this node's pool."""
    if len(asked["devices"]) != len(range(*asked["ranks"])):
        raise WorkerError(f"Ray gave {asked['devices']} for ranks {asked['ranks']}")
    first, _ = asked["ranks"]
    interface = asked["interface"]
    return WorkerSpec(
        devices=tuple(asked["devices"]),
        setup=asked["setup"],
        backend=asked["backend"],
        setup_args=asked["setup_args"],
        # The ranks meet on the network that connects the nodes; what the node's owner chose comes first.
        environment={
            name: os.environ.get(name, interface) for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
        }
        | asked["environment"],
        import_paths=tuple(asked["import_paths"]),
        import_roots=asked["import_roots"],
        num_threads=asked["num_threads"],
        deadlines=Deadlines(**asked["deadlines"]),
        span=RankSpan(first, asked["world_size"], asked["store"]),
    )
