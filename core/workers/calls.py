"""Calls that are under way: who still has to reply, until when, and what the caller gets."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from ..errors import WorkerError

# The first calls of a kind may compile or record what later ones use, so fewer say nothing; the slowest of
# the last ones counts, so that a slow first one is soon forgotten.
_FEWEST_CALLS = 3
_COMPARED_CALLS = 4
_KNOWN_KINDS = 64


class PendingCall:
    """A call whose replies are awaited. Made by ``WorkerPool.submit``.

    Attributes:
        number: Its number, unique in its pool.
        job: The job's name.
        ranks: The ranks that run it.
        deadline_s: Seconds from submission to the last reply.
        usual_s: The longest time in calls of the same work before in which no rank got on, in seconds (all of
            it, if they mark no progress); None if nothing is known.
        same_work: Whether all ranks do the same work, so that each tells how long it takes.
        leases_results: Whether large tensors of the results may stay in a worker's buffer.
    """

    def __init__(self, number: int, job: str, ranks: Sequence[int], deadline_s: float) -> None:
        self.number = number
        self.job = job
        self.ranks = tuple(ranks)
        self.deadline_s = deadline_s
        self.missing = set(ranks)
        self.submitted_at = time.monotonic()
        self.due = self.submitted_at + deadline_s
        self.alike: Hashable = None
        self.usual_s: float | None = None
        self.same_work = False
        self.leases_results = False
        self.longest_part_s: float | None = None
        self._got_on_at = self.submitted_at
        self._longest_s = 0.0
        self.abandoned = False
        self._over = threading.Event()
        self._results: dict[int, Any] = {}
        self._error: str | None = None

    @property
    def done(self) -> bool:
        """Whether ``wait`` would return or raise at once."""
        return self._over.is_set()

    def wait(
        self, *, poll: Callable[[], object] | None = None, poll_interval_s: float = 0.05
    ) -> dict[int, Any]:
        """Wait for the replies of all ranks.

        Args:
            poll: Called before waiting and every ``poll_interval_s``, in this thread. Whatever it raises
                (ComfyUI's interrupt, which may be a ``BaseException``) abandons the call and goes to the
                caller; the workers finish what they do, and the pool stays usable.
            poll_interval_s: Seconds between two polls.

        Returns:
            Each rank's result. Tensors are on the CPU and belong to the caller.

        Raises:
            WorkerError: If any rank of the pool raised, died or was late; all are stopped by then.
        """
        try:
            self._poll_until_over(poll, poll_interval_s)
        except BaseException:
            self.abandon()
            raise
        if self._error is not None:
            raise WorkerError(self._error)
        if self.abandoned:
            raise WorkerError(
                f"the results of job {self.job!r} are gone: the call was abandoned. Call again."
            )
        return {rank: self._results[rank] for rank in self.ranks}

    def abandon(self) -> None:
        """Give up on the results; replies still to come are dropped. The deadline stays in force."""
        self.abandoned = True
        self._results = {}

    def note_progress(self) -> None:
        """Note that a rank has got on (called by the watchdog)."""
        now = time.monotonic()
        self._longest_s = max(self._longest_s, now - self._got_on_at)
        self._got_on_at = now

    def deliver(self, rank: int, result: Any) -> None:
        """Note one rank's result (called by the watchdog)."""
        self.missing.discard(rank)
        if not self.abandoned:
            self._results[rank] = result
        if not self.missing:
            self.note_progress()
            self.longest_part_s = self._longest_s
            self._over.set()

    def fail(self, message: str) -> None:
        """End the call with a ``WorkerError`` (called by the watchdog)."""
        if not self._over.is_set():
            self._error = message
            self._over.set()

    def _poll_until_over(self, poll: Callable[[], object] | None, interval_s: float) -> None:
        while True:
            if poll is not None:
                poll()
            if self._over.wait(None if poll is None else interval_s):
                return


class CallTable:
    """All calls of one pool that have not had every reply. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: dict[int, PendingCall] = {}
        self._next_number = 0
        self._ended: str | None = None
        self._parts_s: dict[Hashable, deque[float]] = {}

    @property
    def ended(self) -> bool:
        """Whether the pool takes no more calls."""
        return self._ended is not None

    @property
    def ended_because(self) -> str | None:
        """A sentence, or None while the pool takes calls."""
        return self._ended

    def open(self, job: str, ranks: Sequence[int], deadline_s: float) -> PendingCall:
        """Enter a new call.

        Raises:
            WorkerError: If the pool takes no more calls.
        """
        with self._lock:
            if self._ended is not None:
                raise WorkerError(f"job {job!r} cannot run: {self._ended} Start a new pool.")
            call = PendingCall(self._next_number, job, ranks, deadline_s)
            self._next_number += 1
            self._calls[call.number] = call
            return call

    def find(self, number: int) -> PendingCall:
        """Return the open call ``number``."""
        with self._lock:
            return self._calls[number]

    def deliver(self, call: PendingCall, rank: int, result: Any) -> None:
        """Note one rank's result; with the last one the call is over."""
        with self._lock:
            if call.missing == {rank}:
                del self._calls[call.number]
            call.deliver(rank, result)
            self._remember(call)

    def compare(self, call: PendingCall, alike: Hashable) -> None:
        """Compare a call with earlier ones that do the same work, and later ones with it.

        Args:
            call: Just opened.
            alike: Equal for calls of the same work.
        """
        with self._lock:
            known = self._parts_s.get(alike)
            call.alike = alike
            if known is not None and len(known) >= _FEWEST_CALLS:
                call.usual_s = max(known)
            self._remember(call)

    def _remember(self, call: PendingCall) -> None:
        if call.alike is None or call.longest_part_s is None:
            return
        known = self._parts_s.pop(call.alike, None) or deque(maxlen=_COMPARED_CALLS)
        known.append(call.longest_part_s)
        self._parts_s[call.alike] = known  # the last used last
        if len(self._parts_s) > _KNOWN_KINDS:
            del self._parts_s[next(iter(self._parts_s))]
        call.longest_part_s = None

    def late(self, now: float) -> PendingCall | None:
        """Return a call that is past its deadline at ``now``, if any."""
        with self._lock:
            return next((call for call in self._calls.values() if call.due < now), None)

    def running(self) -> list[PendingCall]:
        """Return the calls that are under way."""
        with self._lock:
            return list(self._calls.values())

    def refuse(self, reason: str) -> None:
        """Take no more calls; ``reason`` is a sentence. The first reason stays."""
        with self._lock:
            self._ended = self._ended or reason

    def fail(self, message: str) -> None:
        """End every open call with ``message``."""
        with self._lock:
            for call in self._calls.values():
                call.fail(message)
            self._calls.clear()
