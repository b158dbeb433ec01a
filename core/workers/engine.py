"""``RankEngine``: what the rest of the pack sees of worker processes, wherever they run."""

from __future__ import annotations

import abc
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from ..errors import RequestError
from .calls import CallTable, PendingCall
from .spec import WorkerSpec


class RankEngine(abc.ABC):
    """Worker processes, one per rank, that serve any number of calls.

    Several threads may submit calls. All ranks receive the calls in one order, so calls that meet in a
    rank cannot wait for each other inside collectives; calls on different ranks run at the same time.
    A context manager.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        self._calls = CallTable()
        self._order = threading.Lock()
        self._jobs: frozenset[str] = frozenset()

    @property
    def ranks(self) -> range:
        """All ranks."""
        return self.spec.ranks

    @property
    def jobs(self) -> list[str]:
        """The jobs that the ranks offer."""
        return sorted(self._jobs)

    @property
    def busy(self) -> bool:
        """Whether calls are under way."""
        return bool(self._calls.running())

    @property
    @abc.abstractmethod
    def alive(self) -> bool:
        """Whether calls are taken."""

    @property
    def device_names(self) -> tuple[str, ...]:
        """What messages call each rank's device."""
        return tuple(str(device) for device in self.spec.devices)

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
        alike: Hashable = None,
        same_work: bool = False,
        leases_results: bool = False,
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
            alike: Equal for calls of the same work: one that takes many times as long as those before is
                given up (``Deadlines.overdue_s``). None: nothing is compared.
            same_work: All ranks do the same work: one that computes on, long after it took another to come to
                where it waits for it, is given up likewise, also in the first such call.
            leases_results: Large tensors of the results may stay in a worker's buffer, which the
                worker has again when they are gone. For results that are used up soon.

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
        call = self._submit(job, payloads, self.spec.deadlines.call_s if deadline_s is None else deadline_s)
        if alike is not None:
            self._calls.compare(call, alike)
        call.same_work = same_work
        call.leases_results = leases_results
        return call

    def call(
        self,
        job: str,
        payload: Mapping[str, Any] | None = None,
        *,
        payloads_by_rank: Mapping[int, Mapping[str, Any]] | None = None,
        ranks: Sequence[int] | None = None,
        deadline_s: float | None = None,
        alike: Hashable = None,
        same_work: bool = False,
        leases_results: bool = False,
        poll: Callable[[], object] | None = None,
    ) -> dict[int, Any]:
        """Submit a call and wait for it; see ``submit`` and ``PendingCall.wait``."""
        pending = self.submit(
            job,
            payload,
            payloads_by_rank=payloads_by_rank,
            ranks=ranks,
            deadline_s=deadline_s,
            alike=alike,
            same_work=same_work,
            leases_results=leases_results,
        )
        return pending.wait(poll=poll)

    def send_ahead(  # noqa: B027 - what most pools need is nothing
        self, payload: Mapping[str, Any], *, poll: Callable[[], object] | None = None
    ) -> None:
        """Bring the shared files of a coming call's payload to where the ranks are.

        A call does it too, but cannot be cancelled meanwhile. On one machine there is nothing to bring.

        Args:
            payload: For all ranks.
            poll: Called regularly; what it raises ends the sending, which goes on from there next time.

        Raises:
            RequestError: If a machine has no memory for them.
            WorkerError: If the pool is lost.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Stop the workers; open calls end with ``WorkerError``. May be called again."""

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

    @abc.abstractmethod
    def _submit(
        self, job: str, payloads: Mapping[int, Mapping[str, Any]], deadline_s: float, *, kind: str = "call"
    ) -> PendingCall:
        """Send each rank its arguments and return at once."""
