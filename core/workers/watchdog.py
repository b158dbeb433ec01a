"""The one thread of a pool: takes the replies, and sees to it that no caller waits for ever.

A pool is lost when a rank's process ends, when a job raises, when a call is past its deadline, when a
rank hangs (see ``stalls``), or when its interpreter runs no thread (its heartbeat stands still). One
lost rank loses the pool, because the others may be inside a collective with it. Then: give the other
ranks a moment to report, have those that still run write their stacks, kill all, and only then tell
the callers.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
import time
import traceback

from .activity import ProcessActivity
from .calls import CallTable
from .channel import Message
from .launcher import RankGroup, RankProcess
from .report import RankReport, compose, describe_exit, first_failure
from .spec import Deadlines
from .stalls import Stall, StallDetector

_TICK_S = 0.25
# After the first failure: time for the other ranks to raise, and for stacks to reach the logs.
_SETTLE_S = 0.5
_DUMP_S = 1.0
_EXIT_CODE_S = 1.0
_JOIN_SLACK_S = 10.0


class Watchdog:
    """Watches over one pool's processes from its own daemon thread.

    Args:
        group: The processes.
        calls: The calls under way.
        deadlines: How long to wait.
        waiting_shows: Whether a rank that waits for others works meanwhile, as it does with NCCL.
        sees_all: Whether there are no ranks besides this pool's, for which these could be waiting.
    """

    def __init__(
        self,
        group: RankGroup,
        calls: CallTable,
        deadlines: Deadlines,
        *,
        waiting_shows: bool,
        sees_all: bool = True,
    ) -> None:
        self._group = group
        self._calls = calls
        self._deadlines = deadlines
        self._owner = os.getpid()
        self._closing = False
        self._cause: str | None = None
        self._stall: Stall | None = None
        self._started = False
        self._wake_up, self._woken = socket.socketpair()
        self._wake_up.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._reports = {
            rank.rank: RankReport(rank.rank, rank.device, rank.process.pid, rank.log_path)
            for rank in group.ranks
        }
        self._failed: list[int] = []
        self._beats = {rank.rank: (-1, 0.0) for rank in group.ranks}
        self._looked_at = time.monotonic()
        self._stalls = StallDetector(
            {rank.rank: ProcessActivity(rank.process.pid) for rank in group.ranks},
            deadlines.stall_s,
            progress={rank.rank: rank.progress for rank in group.ranks},
            waits={rank.rank: rank.waits for rank in group.ranks},
            overdue_s=deadlines.overdue_s,
            one_is_enough=waiting_shows,
            all_are_enough=sees_all,
        )
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        for rank in group.ranks:
            self._selector.register(rank.link.connection, selectors.EVENT_READ, rank)
        self._thread = threading.Thread(target=self._run, name="ferry-watchdog", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def expect_heartbeats(self) -> None:
        """Count silence as failure from now on; while a worker imports, silence means nothing."""
        self._started = True

    def report(self, cause: str) -> None:
        """Say that the pool is lost; from any thread."""
        self._cause = self._cause or cause
        self._wake()

    @property
    def idle_s(self) -> dict[int, float]:
        """For how long each rank has done nothing although a call waits for it."""
        return self._stalls.idle_s

    def close(self) -> None:
        """End the pool: in good order if no call is under way, at once otherwise.

        From any thread, any number of times.
        """
        if os.getpid() != self._owner:
            return  # A forked copy of this process owns none of the workers.
        self._closing = True
        self._wake()
        if threading.current_thread() is self._thread:
            return  # A finalizer that ran in our own thread; the loop does the rest.
        self._thread.join(self._deadlines.close_s + _JOIN_SLACK_S)
        self._release()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full: awake already; closed: nothing left to do
            self._wake_up.send(b"!")

    def _run(self) -> None:
        try:
            if self._watch():
                self._shut_down()
                self._release()
            else:
                self._end_lost_pool()
        except BaseException:  # noqa: BLE001 - the thread boundary; a caller would wait for ever
            self._calls.refuse("its watchdog failed.")
            self._group.kill()
            self._calls.fail(
                f"the pool's watchdog failed; all workers were stopped.\n{traceback.format_exc()}"
            )

    def _watch(self) -> bool:
        """Serve until the pool is to be closed (True) or is lost (False)."""
        while True:
            # Taken before looking for replies: one that came in time must not count as late because
            # this process was busy.
            looked_at = time.monotonic()
            self._take_replies(max(0.0, self._looked_at + _TICK_S - looked_at))
            if self._closing:
                self._note_the_dead()
            if self._failed or self._cause is not None:
                return False
            if self._closing:
                return True
            # Not after every reply: it would make the next one wait.
            if looked_at - self._looked_at >= _TICK_S:
                self._cause = self._find_late(looked_at) or self._find_hanging()

    def _note_the_dead(self) -> None:
        """Count a rank that has ended as failed, if calls are under way: they should say why they end.

        Somebody may have seen it and closed the pool before its connection told this thread.
        """
        if not self._calls.running():
            return
        for rank in self._group.ranks:
            if rank.process.poll() is not None and rank.rank not in self._failed:
                self._reports[rank.rank].ended = describe_exit(rank.process.returncode)
                self._failed.append(rank.rank)

    def _take_replies(self, timeout_s: float) -> None:
        for key, _ in self._selector.select(timeout_s):
            if key.data is None:
                self._woken.recv(4096)
            else:
                self._read(key.data)

    def _read(self, rank: RankProcess) -> None:
        try:
            while (message := rank.link.receive()) is not None:
                self._handle(rank, message)
        except EOFError:
            self._selector.unregister(rank.link.connection)
            self._reports[rank.rank].ended = describe_exit(rank.wait(_EXIT_CODE_S))
            self._failed.append(rank.rank)

    def _handle(self, rank: RankProcess, message: Message) -> None:
        if message.fields["kind"] == "error":
            report = self._reports[rank.rank]
            report.raised = message.fields["summary"]
            report.traceback = message.fields["traceback"]
            self._failed.append(rank.rank)
            return
        call = self._calls.find(message.fields["call"])
        # An abandoned call's tensors are not even copied.
        if call.abandoned:
            result = None
        elif call.leases_results:
            result = rank.link.take(message)
        else:
            result = message.decode()
        rank.link.finish(message)
        self._calls.deliver(call, rank.rank, result)

    def _find_late(self, now: float) -> str | None:
        call = self._calls.late(now)
        if call is None:
            return None
        ranks = ", ".join(str(rank) for rank in sorted(call.missing))
        return f"job {call.job!r} had no reply from rank {ranks} within its deadline of {call.deadline_s:g} s"

    def _find_hanging(self) -> str | None:
        now = time.monotonic()
        elapsed_s, self._looked_at = now - self._looked_at, now
        # Capped: while this process itself was stopped, nobody could see what the others did.
        counted_s = min(elapsed_s, 2 * _TICK_S)
        stall = self._stalls.find(self._calls.running(), elapsed_s=elapsed_s, counted_s=counted_s)
        if stall is not None:
            self._stall = stall
            for rank in stall.ranks:
                self._reports[rank].hung = not stall.computes
            return stall.describe(stall.ranks)
        return self._find_silent(counted_s)

    def _find_silent(self, counted_s: float) -> str | None:
        for rank in self._group.ranks:
            beats, silent_s = self._beats[rank.rank]
            latest = rank.beats()
            silent_s = silent_s + counted_s if latest == beats and self._started else 0.0
            self._beats[rank.rank] = (latest, silent_s)
            if silent_s > self._deadlines.heartbeat_s:
                return f"worker rank {rank.rank} has run no Python for {silent_s:.0f} s"
        return None

    def _end_lost_pool(self) -> None:
        headline = self._cause or first_failure(self._failed_reports())
        self._calls.refuse(f"the pool is lost ({headline}).")
        # Ranks that hang raise nothing any more.
        until = time.monotonic() + (_SETTLE_S if self._failed else 0.0)
        while len(set(self._failed)) < len(self._reports) and time.monotonic() < until:
            self._take_replies(max(0.0, until - time.monotonic()))
        for rank in self._group.dump_stacks(without=self._failed, timeout_s=_DUMP_S):
            self._reports[rank].stacks_dumped = True
        self._group.kill()
        if self._stall is not None:
            # Now that the stacks are there: who hangs, and who only waits for it.
            blamed = [rank for rank in self._stall.ranks if not self._reports[rank].waits_for_others]
            self._cause = self._stall.describe(blamed or self._stall.ranks)
        self._calls.fail(compose(self._cause, self._failed_reports(), self._calls.running()))

    def _failed_reports(self) -> list[RankReport]:
        """Return all ranks' reports, those that failed first, in the order they did."""
        order = list(dict.fromkeys([*self._failed, *self._reports]))
        return [self._reports[rank] for rank in order]

    def _shut_down(self) -> None:
        ended = [rank for rank in self._group.ranks if rank.process.poll() is not None]
        for rank in ended[:1]:  # closed because somebody saw it before us
            fate = describe_exit(rank.process.returncode)
            self._calls.refuse(f"the pool is lost (worker rank {rank.rank} {fate}).")
        self._calls.refuse("the pool was closed.")
        if self._calls.running():
            self._group.kill()
            self._calls.fail("the pool was closed while this call was under way. Start a new pool.")
            return
        for rank in self._group.ranks:
            with contextlib.suppress(OSError):  # gone already
                rank.link.send({"kind": "stop"})
        self._group.wait(self._deadlines.close_s)

    def _release(self) -> None:
        self._group.close()
        self._stalls.close()
        self._selector.close()
        self._wake_up.close()
        self._woken.close()
