"""``ClusterPool``: the same interface as ``WorkerPool``, with the ranks on the nodes of a Ray cluster."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from ...errors import WorkerError
from ..calls import PendingCall
from ..engine import RankEngine
from ..protocol import PayloadEncoder
from ..spec import WorkerSpec
from .addresses import check_address, find_cluster
from .driver_process import DriverProcess
from .file_copies import FileCopies
from .joining import Joining
from .node_link import NodeLink, NodeSilentError
from .spec import ClusterSpec
from .stream import write_payloads
from .watch import ClusterWatch


class ClusterPool(RankEngine):
    """Running workers on the nodes of a Ray cluster. Made by ``start``."""

    def __init__(self, spec: WorkerSpec, links: Sequence[NodeLink], driver: DriverProcess) -> None:
        super().__init__(spec)
        self._links = links
        self._files = FileCopies(links)
        self._watch = ClusterWatch(links, driver, self._calls, spec.deadlines, self._files.drop_dead)
        self._finalizer = weakref.finalize(self, self._watch.close)
        self._watch.start()

    @classmethod
    def start(
        cls, spec: WorkerSpec, cluster: ClusterSpec, *, poll: Callable[[], object] | None = None
    ) -> ClusterPool:
        """Start all workers, or none.

        Args:
            spec: The workers. Of its devices only the number counts, and whether they are GPUs; which
                ones, Ray decides. Folders are those of this machine.
            cluster: Where they run.
            poll: Called regularly while waiting; what it raises cancels the start.

        Raises:
            RequestError: If Ray is not installed, nothing answers at the address, there are too few GPUs, or
                a node is not like this machine; then no worker was started.
            TypeError: If ``setup_args`` holds what cannot be sent; then no process was started.
            WorkerError: If Ray or a rank did not start; it holds every rank's traceback and last log lines.
        """
        PayloadEncoder().encode(dict(spec.setup_args), "setup_args")
        check_address(cluster.address)
        cluster = replace(cluster, address=find_cluster(cluster.address))
        until = time.monotonic() + spec.deadlines.start_s
        driver = DriverProcess()
        try:
            links = Joining(driver, spec, cluster, until=until, poll=poll).connect()
            pool = cls(spec, [link for link, _ in links], driver)
        except BaseException:
            driver.close()
            raise
        try:
            pool._start_ranks([described for _, described in links], poll)
        except BaseException:
            pool.close()
            raise
        return pool

    @property
    def alive(self) -> bool:
        """Whether the pool takes calls."""
        return not self._calls.ended

    @property
    def device_names(self) -> tuple[str, ...]:
        """What messages call each rank's device: its node's address and, on a GPU, the UUID."""
        return tuple(f"{link.share.address} {device}" for link in self._links for device in link.devices)

    @property
    def nodes(self) -> tuple[tuple[str, range], ...]:
        """Address and ranks of each node."""
        return tuple((link.share.address, link.share.ranks) for link in self._links)

    def send_ahead(self, payload: Mapping[str, Any], *, poll: Callable[[], object] | None = None) -> None:
        """Bring the shared files of a coming call's payload to every node."""
        encoder = PayloadEncoder()
        encoder.encode(dict(payload), "payload")
        self._files.bring(encoder.files, self._links, poll)

    def close(self) -> None:
        """Stop the workers and leave the cluster; open calls end with an error. May be called again."""
        self._finalizer.detach()
        self._watch.close()

    def _start_ranks(self, described: Sequence[Mapping[str, Any]], poll: Callable[[], object] | None) -> None:
        timeout_s = self.spec.deadlines.start_s
        first = self._links[0]
        try:
            store = first.ask({"kind": "store", "world_size": self.spec.num_ranks, "timeout_s": timeout_s})
        except NodeSilentError as error:
            raise WorkerError(str(error)) from error
        except (EOFError, OSError) as error:
            raise WorkerError(f"{first.name} ended while the pool was starting: {error}") from error
        starts = {
            rank: _start_arguments(self.spec, link, node, store["store"])
            for link, node in zip(self._links, described, strict=True)
            for rank in link.share.ranks
        }
        call = self._submit("start", starts, timeout_s, kind="start")
        jobs = call.wait(poll=poll)
        if len(set(map(tuple, jobs.values()))) > 1:
            raise WorkerError(f"{self.spec.setup} registered different jobs on different ranks: {jobs}")
        self._jobs = frozenset(next(iter(jobs.values())))

    def _submit(
        self, job: str, payloads: Mapping[int, Mapping[str, Any]], deadline_s: float, *, kind: str = "call"
    ) -> PendingCall:
        encoder = PayloadEncoder()
        contents: list[bytes] = []
        places: dict[int, int] = {}
        for payload in payloads.values():
            if not all(isinstance(name, str) for name in payload):
                raise TypeError(f"a payload holds a job's keyword arguments by name, not {list(payload)}")
            if id(payload) not in places:
                places[id(payload)] = len(contents)
                contents.append(encoder.encode(dict(payload), "payload"))
        index = {rank: places[id(payload)] for rank, payload in payloads.items()}
        links = [link for link in self._links if any(rank in index for rank in link.share.ranks)]
        numbers = self._files.bring(encoder.files, links, None)
        buffer = write_payloads(encoder)
        with self._order:
            call = self._calls.open(job, list(payloads), deadline_s)
            fields = {
                "kind": kind,
                "call": call.number,
                "job": job,
                "deadline_s": deadline_s,
                "files": numbers,
            }
            for link in links:
                mine = {rank: index[rank] for rank in link.share.ranks if rank in index}
                needed = sorted(set(mine.values()))
                ranks = [[rank, needed.index(place)] for rank, place in mine.items()]
                try:
                    link.stream.send(fields | {"ranks": ranks}, [contents[place] for place in needed], buffer)
                except OSError as error:
                    self._watch.report(link, f"it could not be sent a call: {error}")
                    break
                except BaseException:
                    # Some ranks have the call and others do not: collectives would never meet again.
                    self._watch.report(link, "sending a call to it was interrupted")
                    raise
        return call


def _start_arguments(spec: WorkerSpec, link: NodeLink, node: Mapping[str, Any], store: str) -> dict[str, Any]:
    count = len(spec.import_paths)
    return {
        "ranks": [link.share.ranks.start, link.share.ranks.stop],
        "world_size": spec.num_ranks,
        "store": store,
        "devices": link.devices,
        "interface": node["interface"],
        "setup": spec.setup,
        "backend": spec.backend,
        "setup_args": dict(spec.setup_args),
        "environment": dict(spec.environment),
        "import_paths": node["paths"][:count],
        "import_roots": dict(zip(spec.import_roots, node["paths"][count:], strict=True)),
        "num_threads": spec.num_threads,
        "deadlines": asdict(spec.deadlines),
    }
