"""What the calls of one parallel MODEL cost, as measured: each worker's time, and the time of an evaluation.

An *evaluation* is the model's output for one sample of one conditioning; a call of batch 2 is two of them.
Calls that are away at the same time (CFG parallel) share their time, so seconds an evaluation can be compared
between any degrees. The first call of a sampling warms up and does not count for them.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class RankUse:
    """How one worker spent the time since the last reading.

    Attributes:
        computes: Share of the time in which it computed, 0 to 1.
        waits: Share in which it waited for other workers inside a call; None where that cannot be told.
        memory_bytes: GPU memory that it holds, None on the CPU.
    """

    computes: float
    waits: float | None
    memory_bytes: int | None


@dataclass(frozen=True)
class Usage:
    """What ``CallMeter.read`` found.

    Attributes:
        ranks: Each worker.
        evaluation_s: Seconds an evaluation in this sampling, None before its second call is over.
        exchange_share: Part of the workers' calls spent waiting for each other, over the calls of this
            sampling in which that could be told; None if it could in none.
    """

    ranks: tuple[RankUse, ...]
    evaluation_s: float | None
    exchange_share: float | None


@dataclass
class _RankTotals:
    busy_s: float = 0.0
    waited_s: float = 0.0
    # Of the calls that told what they waited.
    told_busy_s: float = 0.0
    memory_bytes: int | None = None


@dataclass
class _Totals:
    """Sums of one sampling."""

    ranks: list[_RankTotals]
    # Of each stretch of time in which calls were away: its seconds and its evaluations.
    stretches: list[tuple[float, int]] = field(default_factory=list)


class CallMeter:
    """Measures sampling after sampling. Safe to use from several threads.

    Args:
        num_ranks: Workers.
        clock: Seconds; for tests.
    """

    def __init__(self, num_ranks: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._num_ranks = num_ranks
        self._clock = clock
        self._lock = threading.Lock()
        self.begin()

    def begin(self) -> None:
        """Forget what was before: a sampling starts."""
        with self._lock:
            self._totals = _Totals([_RankTotals() for _ in range(self._num_ranks)])
            self._read_at_s = self._clock()
            self._read_before = [_RankTotals() for _ in range(self._num_ranks)]
            self._away = 0
            self._left_s = 0.0
            self._evaluations = 0

    @contextlib.contextmanager
    def call(self, evaluations: int) -> Iterator[None]:
        """Measure one call; one that raises does not count."""
        with self._lock:
            if self._away == 0:
                self._left_s, self._evaluations = self._clock(), 0
            self._away += 1
        done = 0
        try:
            yield
            done = evaluations
        finally:
            with self._lock:
                self._away -= 1
                self._evaluations += done
                if self._away == 0 and self._evaluations:
                    stretch = (self._clock() - self._left_s, self._evaluations)
                    self._totals.stretches.append(stretch)

    def note(self, replies: Mapping[int, Mapping[str, Any]]) -> None:
        """Add what each rank says of a call: ``busy_s``; ``waited_s`` and ``memory_bytes``, or None."""
        with self._lock:
            for rank, reply in replies.items():
                total = self._totals.ranks[rank]
                total.busy_s += reply["busy_s"]
                if reply["waited_s"] is not None:
                    total.waited_s += reply["waited_s"]
                    total.told_busy_s += reply["busy_s"]
                total.memory_bytes = reply["memory_bytes"]

    def read(self) -> Usage:
        """Return the use since the last reading (or the start), and the sampling's times so far."""
        with self._lock:
            now_s = self._clock()
            elapsed_s = max(now_s - self._read_at_s, 1e-9)
            ranks = []
            for total, before in zip(self._totals.ranks, self._read_before, strict=True):
                # A call counts when its reply is here, so it may reach back before the last reading.
                waits = min(1.0, (total.waited_s - before.waited_s) / elapsed_s)
                busy = min(1.0, (total.busy_s - before.busy_s) / elapsed_s)
                known = math.isclose(total.told_busy_s - before.told_busy_s, total.busy_s - before.busy_s)
                ranks.append(RankUse(max(0.0, busy - waits), waits if known else None, total.memory_bytes))
            self._read_at_s = now_s
            self._read_before = [replace(total) for total in self._totals.ranks]
            return Usage(tuple(ranks), self._evaluation_s(), self._exchange_share())

    def _evaluation_s(self) -> float | None:
        counted = self._totals.stretches[1:]
        evaluations = sum(count for _, count in counted)
        return sum(seconds for seconds, _ in counted) / evaluations if evaluations else None

    def _exchange_share(self) -> float | None:
        told_s = sum(total.told_busy_s for total in self._totals.ranks)
        return sum(total.waited_s for total in self._totals.ranks) / told_s if told_s else None
