"""``WorkerPool``: what the rest of the pack sees of the worker processes."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from ..errors import RequestError, WorkerError
from .calls import CallTable, PendingCall
from .channel import Outgoing
from .launcher import RankGroup, launch
from .links import check_links
from .protocol import PayloadEncoder
from .spec import WorkerSpec
from .watchdog import Watchdog


class WorkerPool:
    """Running worker processes, one per rank, that serve any number of calls.

    Several threads may submit calls. All ranks receive the calls in one order, so calls that meet in a
    rank cannot wait for each other inside collectives; calls on different ranks run at the same time.
    Made by ``start``; a context manager; also closed when it is collected and when Python exits.
    """

    def __init__(self, spec: WorkerSpec, group: RankGroup) -> None:
        self.spec = spec
        self._group = group
        self._calls = CallTable()
        self._watchdog = Watchdog(
            group,
            self._calls,
            spec.deadlines,
            waiting_shows=spec.backend == "nccl",
            sees_all=spec.world_size == spec.num_ranks,
        )
        self._order = threading.Lock()
        self._jobs: frozenset[str] = frozenset()
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
        PayloadEncoder().encode(dict(spec.setup_args), "setup_args")
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
    def ranks(self) -> range:
        """All ranks."""
        return self.spec.ranks

    @property
    def alive(self) -> bool:
        """Whether the pool takes calls."""
        running = all(rank.process.poll() is None for rank in self._group.ranks)
        return running and not self._calls.ended

    @property
    def ended_because(self) -> str | None:
        """Why the pool takes no more calls, in a sentence; None while it does, as far as is known."""
        return self._calls.ended_because

    def submit(
        self,
        job: str,
        payload: Mapping[str, Any] | None = None,
        *,
        payloads_by_rank: Mapping[int, Mapping[str, Any]] | None = None,
        ranks: Sequence[int] | None = None,
        deadline_s: float | None = None,
    ) -> PendingCall:
        """Send a call and return at once.

        Args:
            job: A name that ``setup`` registered.
            payload: The job's keyword arguments, the same for all ``ranks``: any value that ``protocol``
                can write. Tensors are copied before this returns, once for all ranks.
            payloads_by_rank: Instead of ``payload`` and ``ranks``: each rank's own arguments. A tensor
                that several of them hold is copied once.
            ranks: Who runs it; None: all.
            deadline_s: Seconds until the last reply, time in the ranks' queues included; None: the
                spec's ``call_s``.

        Raises:
            RequestError: If the job or a rank does not exist.
            TypeError: If the payload holds what cannot be sent; the message names its path.
            WorkerError: If the pool is closed or lost.
        """
        if job not in self._jobs:
            raise RequestError(
                f"job {job!r} was asked",
                limit=f"The workers offer {', '.join(sorted(self._jobs))}",
                way_out=f"Name one of them, or register it in {self.spec.setup}",
            )
        payloads = self._by_rank(payload, payloads_by_rank, ranks)
        return self._submit(job, payloads, self.spec.deadlines.call_s if deadline_s is None else deadline_s)

    def call(
        self,
        job: str,
        payload: Mapping[str, Any] | None = None,
        *,
        payloads_by_rank: Mapping[int, Mapping[str, Any]] | None = None,
        ranks: Sequence[int] | None = None,
        deadline_s: float | None = None,
        poll: Callable[[], object] | None = None,
    ) -> dict[int, Any]:
        """Submit a call and wait for it; see ``submit`` and ``PendingCall.wait``."""
        pending = self.submit(
            job, payload, payloads_by_rank=payloads_by_rank, ranks=ranks, deadline_s=deadline_s
        )
        return pending.wait(poll=poll)

    def close(self) -> None:
        """Stop the workers; open calls end with ``WorkerError``. May be called again."""
        self._finalizer.detach()
        self._watchdog.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _by_rank(
        self,
        payload: Mapping[str, Any] | None,
        payloads_by_rank: Mapping[int, Mapping[str, Any]] | None,
        ranks: Sequence[int] | None,
    ) -> dict[int, Mapping[str, Any]]:
        if payloads_by_rank is not None and (payload is not None or ranks is not None):
            raise ValueError("payloads_by_rank replaces payload and ranks; give one or the other")
        chosen = list(self.ranks if ranks is None else ranks)
        if payloads_by_rank is not None:
            chosen = sorted(payloads_by_rank)
        if not chosen or len(set(chosen)) < len(chosen) or not set(chosen) <= set(self.ranks):
            raise RequestError(
                f"ranks {chosen} were asked",
                limit=f"The pool has ranks {self.ranks[0]} to {self.ranks[-1]}, and each can be named once",
                way_out="Name at least one of them",
            )
        if payloads_by_rank is not None:
            return {rank: payloads_by_rank[rank] for rank in chosen}
        return dict.fromkeys(chosen, {} if payload is None else payload)

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
