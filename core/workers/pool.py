"""``WorkerPool``: the worker processes of this machine."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import WorkerError
from .calls import PendingCall
from .channel import Outgoing
from .engine import RankEngine
from .launcher import RankGroup, launch
from .links import check_links
from .protocol import PayloadEncoder, check_sendable
from .spec import WorkerSpec
from .watchdog import Watchdog


class WorkerPool(RankEngine):
    """Running worker processes on this machine, one per rank.

    Made by ``start``; also closed when it is collected and when Python exits.
    """

    def __init__(self, spec: WorkerSpec, group: RankGroup) -> None:
        super().__init__(spec)
        self._group = group
        self._watchdog = Watchdog(
            group,
            self._calls,
            spec.deadlines,
            waiting_shows=spec.backend == "nccl",
            sees_all=spec.world_size == spec.num_ranks,
        )
        self._finalizer = weakref.finalize(self, self._watchdog.close)
        self._watchdog.start()

    @classmethod
    def start(cls, spec: WorkerSpec, *, poll: Callable[[], object] | None = None) -> WorkerPool:
        """Start all workers, or none.

        Args:
            spec: The workers.
            poll: Called regularly while waiting; what it raises cancels the start.

        Raises:
            RequestError: If a device does not exist or NCCL fails between them; then no worker was started.
            TypeError: If ``setup_args`` holds what cannot be sent; then no process was started.
            WorkerError: If a rank did not start; it holds every rank's traceback and last log lines.
        """
        # Refused here already, because a started process would have to be ended again.
        check_sendable(dict(spec.setup_args), "setup_args")
        if spec.backend == "nccl" and spec.num_ranks > 1:
            check_links(spec.devices)
        group = launch(spec)
        try:
            pool = cls(spec, group)
        except BaseException:
            group.close()
            raise
        try:
            payloads = {rank: _start_arguments(spec, rank, pool._group) for rank in spec.ranks}
            call = pool._submit("start", payloads, spec.deadlines.start_s, kind="start")
            # Drivers of GPUs take their own time to start.
            call.same_work = not spec.on_gpu
            jobs = call.wait(poll=poll)
            if len(set(map(tuple, jobs.values()))) > 1:
                raise WorkerError(f"{spec.setup} registered different jobs on different ranks: {jobs}")
        except BaseException:
            pool.close()
            raise
        pool._jobs = frozenset(next(iter(jobs.values())))
        pool._watchdog.expect_heartbeats()
        return pool

    @property
    def alive(self) -> bool:
        """Whether the pool takes calls."""
        running = all(rank.process.poll() is None for rank in self._group.ranks)
        return running and not self._calls.ended

    @property
    def idle_s(self) -> dict[int, float]:
        """For how long each rank has done nothing although a call waits for it."""
        return self._watchdog.idle_s

    def abort(self, cause: str) -> None:
        """End the pool as lost; open calls fail with ``cause`` and every rank's stacks."""
        self._watchdog.report(cause)

    def close(self) -> None:
        """Stop the workers; open calls end with ``WorkerError``. May be called again."""
        self._finalizer.detach()
        self._watchdog.close()

    def _submit(
        self, job: str, payloads: Mapping[int, Mapping[str, Any]], deadline_s: float, *, kind: str = "call"
    ) -> PendingCall:
        outgoing = _encode(payloads, self._group)
        fields: dict[str, Any] = {"kind": kind, "job": job}
        with self._order:
            call = self._calls.open(job, list(payloads), deadline_s)
            fields["call"] = call.number
            for index, rank in enumerate(payloads):
                try:
                    self._group.ranks[rank - self.ranks[0]].link.send(fields, outgoing, index)
                except (BrokenPipeError, ConnectionResetError):
                    break  # the watchdog reads the end of its file, and says how the rank ended
                except OSError as error:
                    self._watchdog.report(f"worker rank {rank} could not be sent a call: {error}")
                    break
                except BaseException:
                    # Some ranks have the call and others do not: collectives would never meet again.
                    self._watchdog.report(f"sending a call to rank {rank} was interrupted")
                    raise
        return call


def _encode(payloads: Mapping[int, Mapping[str, Any]], group: RankGroup) -> Outgoing:
    encoder = PayloadEncoder()
    written: dict[int, bytes] = {}
    contents = []
    for payload in payloads.values():
        if not all(isinstance(name, str) for name in payload):
            raise TypeError(f"a payload holds a job's keyword arguments by name, not {list(payload)}")
        if id(payload) not in written:
            written[id(payload)] = encoder.encode(dict(payload), "payload")
        contents.append(written[id(payload)])
    return Outgoing(encoder, contents, group.lender)


def _start_arguments(spec: WorkerSpec, rank: int, group: RankGroup) -> dict[str, Any]:
    return {
        "rank": rank,
        "world_size": spec.world_size,
        "on_gpu": spec.on_gpu,
        "backend": spec.backend,
        "rendezvous": str(group.directory / "rendezvous") if spec.span is None else None,
        "store": None if spec.span is None else spec.span.store,
        "collective_s": float(spec.deadlines.collective_s),
        "num_threads": spec.threads_per_rank(),
        "import_paths": [str(path) for path in spec.import_paths],
        "import_roots": {alias: str(folder) for alias, folder in spec.import_roots.items()},
        "setup_module": spec.setup_module,
        "setup_args": dict(spec.setup_args),
    }
