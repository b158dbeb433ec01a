"""Which ranks hang: stopped ones, and ones that do nothing although a call waits for them.

A rank that waits for another one inside a collective does nothing either. With gloo it sleeps, so
a call hangs only once *every* rank that could still bring it on sleeps; calls that share a rank are
judged together, since one may wait for the other. With NCCL a rank waits for its GPU, which shows as
work, so one sleeping rank is enough. An endless loop, or a deadlock on the GPUs, looks like a long
computation; it is told by comparison: a rank is lost that has used far more processor time, since any rank
of its call last got on (see ``progress``), than the longest such time in the same call before. So a slow
GPU, for which the others wait with busy cores, is no fault as long as it gets on. Where all ranks do the
same work, those that are done with it or wait for another one tell how long it takes, also in the first call
of its kind. Processor time, so that a machine without a free core raises no alarm. A call that nothing is
known of ends with its deadline.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from .activity import Activity, ProcessActivity
from .calls import PendingCall

# A part of the same call does not take so many times longer; what it may take at least is `overdue_s`.
_USUAL_TIMES = 4
# Ranks that do the same at the same time differ less.
_PEER_TIMES = 2
# A rank that sleeps for so long waits for another one; shorter, it may have been caught between two things.
_WAITS_S = 0.5


@dataclass(frozen=True)
class Stall:
    """What was found.

    Attributes:
        ranks: The ranks that do nothing.
        jobs: The jobs that wait for them, none if the ranks were stopped.
        limit_s: For how long.
        usual_s: If they compute without an end: seconds that the longest part of the call took before. Else
            None.
        peers_s: Likewise: seconds that the others took for all of it. Else None.
    """

    ranks: tuple[int, ...]
    jobs: tuple[str, ...]
    limit_s: float
    usual_s: float | None = None
    peers_s: float | None = None

    @property
    def computes(self) -> bool:
        """Whether the ranks compute without an end, instead of doing nothing."""
        return self.usual_s is not None or self.peers_s is not None

    def describe(self, blamed: Sequence[int]) -> str:
        """Return the finding in a sentence without its full stop, naming the ranks to blame."""
        many = len(blamed) > 1
        who = f"worker rank{'s' * many} {', '.join(map(str, blamed))} {'were' if many else 'was'}"
        if not self.jobs:
            return f"{who} stopped by a signal (SIGSTOP) {self.limit_s:g} s ago"
        jobs = ", ".join(map(repr, self.jobs))
        if self.peers_s is not None:
            return (
                f"job {jobs} does not end: {who} computing for {self.limit_s:.1f} s and got no further, "
                f"while the others took {self.peers_s:.2g} s and wait"
            )
        if self.usual_s is not None:
            return (
                f"job {jobs} does not end: {who} computing for {self.limit_s:.1f} s and got no further, "
                f"which took {self.usual_s:.2g} s at most before"
            )
        return f"job {jobs} hangs: {who} idle for {self.limit_s:g} s"


class StallDetector:
    """Looks at all processes of a pool again and again.

    Args:
        processes: By rank.
        limit_s: How long a rank may do nothing.
        one_is_enough: Whether one sleeping rank means a fault, because waiting for others shows as work.
        overdue_s: See ``Deadlines``.
        all_are_enough: Whether all of a call's ranks sleeping means one: they have nobody else to wait for.
        progress: Of each rank: returns how far its jobs have come. None: it is not told.
        waits: Of each rank: returns whether it says that it only waits. None: it is not told.
    """

    def __init__(
        self,
        processes: Mapping[int, ProcessActivity],
        limit_s: float,
        *,
        one_is_enough: bool,
        overdue_s: float = math.inf,
        all_are_enough: bool = True,
        progress: Mapping[int, Callable[[], int]] | None = None,
        waits: Mapping[int, Callable[[], bool]] | None = None,
    ) -> None:
        self._processes = processes
        self._limit_s = limit_s
        self._one_is_enough = one_is_enough
        self._all_are_enough = all_are_enough
        self._idle_s = dict.fromkeys(processes, 0.0)
        self._stopped_s = dict.fromkeys(processes, 0.0)
        self._overdue_s = overdue_s
        self._used_s: dict[tuple[int, int], float] = {}  # by rank and call, since any of its ranks got on
        self._spent_s: dict[tuple[int, int], float] = {}  # likewise, in all of the call but its waiting
        self._waits = dict.fromkeys(processes, lambda: False) if waits is None else dict(waits)
        self._progress = dict.fromkeys(processes, lambda: 0) if progress is None else dict(progress)
        self._done = dict.fromkeys(processes, 0)
        self._calls: dict[int, list[int]] = {}

    def find(self, calls: Sequence[PendingCall], *, elapsed_s: float, counted_s: float) -> Stall | None:
        """Look once.

        Args:
            calls: The calls under way.
            elapsed_s: Seconds since the last look, in which the processes could work.
            counted_s: How many of them count; fewer, if this process was itself stopped meanwhile.
        """
        got_on = self._got_on()
        for call in calls:
            if not got_on.isdisjoint(call.missing):
                call.note_progress()
                for rank in call.missing:
                    self._used_s.pop((rank, call.number), None)
        for rank in self._processes:
            numbers = [call.number for call in calls if rank in call.missing]
            self._look(rank, numbers, elapsed_s, counted_s, got_on=rank in got_on)
        stopped = tuple(rank for rank, silent in self._stopped_s.items() if silent >= self._limit_s)
        if stopped:
            return Stall(stopped, (), self._limit_s)
        for jobs, ranks in connected(calls):
            idle = tuple(sorted(rank for rank in ranks if self._idle_s[rank] >= self._limit_s))
            enough = self._one_is_enough and "start" not in jobs
            if idle and (enough or (self._all_are_enough and len(idle) == len(ranks))):
                return Stall(idle, tuple(sorted(jobs)), self._limit_s)
        return self._find_overdue(calls)

    def _find_overdue(self, calls: Sequence[PendingCall]) -> Stall | None:
        numbers = {call.number for call in calls}
        for table in (self._used_s, self._spent_s):
            for key in [key for key in table if key[1] not in numbers]:
                del table[key]
        for call in calls:
            if call.same_work and (stall := self._find_slower_than_others(call)) is not None:
                return stall
            if call.usual_s is None:
                continue
            limit_s = self._overdue_s + _USUAL_TIMES * call.usual_s
            used = {rank: self._used_s.get((rank, call.number), 0.0) for rank in call.missing}
            ranks = tuple(sorted(rank for rank, used_s in used.items() if used_s >= limit_s))
            if ranks:
                return Stall(ranks, (call.job,), limit_s, call.usual_s)
        return None

    def _find_slower_than_others(self, call: PendingCall) -> Stall | None:
        """Return the ranks that compute on, long after others were done or had come to where they wait."""
        mine = [rank for rank in call.ranks if rank in self._processes]
        waiting = [rank for rank in mine if self._only_waits(rank, call)]
        if not waiting:
            return None
        peers_s = max(self._spent_s.get((rank, call.number), 0.0) for rank in waiting)
        limit_s = self._overdue_s + _PEER_TIMES * peers_s
        used = {rank: self._used_s.get((rank, call.number), 0.0) for rank in mine if rank not in waiting}
        ranks = tuple(rank for rank, used_s in used.items() if used_s >= limit_s)
        return Stall(ranks, (call.job,), limit_s, peers_s=peers_s) if ranks else None

    def _only_waits(self, rank: int, call: PendingCall) -> bool:
        return rank not in call.missing or self._idle_s[rank] >= _WAITS_S or self._waits[rank]()

    @property
    def idle_s(self) -> dict[int, float]:
        """For how long each rank has done nothing although a call waits for it."""
        return dict(self._idle_s)

    def close(self) -> None:
        """Look no more."""
        for process in self._processes.values():
            process.close()

    def _got_on(self) -> set[int]:
        """Return the ranks whose jobs have come further since the last look."""
        done = {rank: read() for rank, read in self._progress.items()}
        moved = {rank for rank, count in done.items() if count != self._done[rank]}
        self._done = done
        return moved

    def _look(
        self, rank: int, numbers: list[int], elapsed_s: float, counted_s: float, *, got_on: bool
    ) -> None:
        activity = self._processes[rank].look(elapsed_s, wanted=bool(numbers))
        if numbers and numbers == self._calls.get(rank) and not got_on:
            # Calls run in their order, so it works on the oldest.
            key = (rank, numbers[0])
            used_s = min(counted_s, self._processes[rank].used_s)
            self._used_s[key] = self._used_s.get(key, 0.0) + used_s
            if not self._waits[rank]():
                self._spent_s[key] = self._spent_s.get(key, 0.0) + used_s
        self._stopped_s[rank] = self._stopped_s[rank] + counted_s if activity is Activity.STOPPED else 0.0
        if not numbers or numbers != self._calls.get(rank) or got_on or activity is Activity.BUSY:
            self._idle_s[rank] = 0.0
        elif activity is Activity.WAITING:
            # Seen at one instant only: a loop that sleeps and polls is caught running now and then.
            self._idle_s[rank] = max(0.0, self._idle_s[rank] - 2 * counted_s)
        elif activity is Activity.QUIET:
            self._idle_s[rank] += counted_s
        self._calls[rank] = numbers


def connected(calls: Iterable[PendingCall]) -> list[tuple[set[str], set[int]]]:
    """Return jobs and missing ranks of the calls, together where they share a rank."""
    groups: list[tuple[set[str], set[int]]] = []
    for call in calls:
        jobs, ranks = {call.job}, set(call.missing)
        apart = []
        for group in groups:
            if group[1] & ranks:
                jobs, ranks = jobs | group[0], ranks | group[1]
            else:
                apart.append(group)
        groups = [*apart, (jobs, ranks)]
    return groups
