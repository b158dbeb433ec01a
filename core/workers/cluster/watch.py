"""Watches over a cluster pool: takes the nodes' messages, notices what ends, and ends everything with it.

One thread a node reads its connection; one thread judges. A node is lost if its agent says that its ranks
are, if its connection ends (its processes were killed, or the machine is gone: the kernel notices within
seconds), if Ray says that its agent ended, or if it falls silent. Each node's own ``WorkerPool`` watches the
node's processes. Then: give the others a moment to report, end all agents and with them all ranks, and only
then tell the callers.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import threading
import time
import traceback
from collections.abc import Callable, Sequence

from ...errors import WorkerError
from ..calls import CallTable
from ..spec import Deadlines
from ..stalls import connected
from .driver_process import DriverProcess
from .node_link import NodeLink
from .stream import Frame

_TICK_S = 0.1
# A rank that raised may only have lost the others: their nodes get this long to say what ended them.
_SETTLE_S = 2.0
_MOMENT_S = 0.3
_TIDY_S = 1.5
_NEWS_S = 1.0
# The node's own watch comes first: it can say what its ranks were doing.
_LATE_S = 2.0
_JOIN_SLACK_S = 15.0
_GONE = "it is gone: its processes were killed, or the machine does not answer any more"
_RAISED = re.compile(r"^worker rank \d+ raised ")


class ClusterWatch:
    """Watches over one pool from its own daemon threads.

    Args:
        links: The nodes.
        driver: The process that talks to Ray.
        calls: The calls under way.
        deadlines: How long to wait.
        tidy: Called now and then while all is well.
    """

    def __init__(
        self,
        links: Sequence[NodeLink],
        driver: DriverProcess,
        calls: CallTable,
        deadlines: Deadlines,
        tidy: Callable[[], None],
    ) -> None:
        self._links = links
        self._driver = driver
        self._calls = calls
        self._deadlines = deadlines
        self._tidy = tidy
        self._owner = os.getpid()
        self._news: queue.SimpleQueue[tuple[NodeLink | None, str]] = queue.SimpleQueue()
        self._ended: set[int] = set()  # agents that Ray knows to be over
        self._lost: dict[int, str] = {}  # by node, in the order in which they said so
        self._cause: str | None = None
        self._driver_ended = False
        self._closing = False
        self._looked_at = time.monotonic()
        self._silent_s = {link.number: 0.0 for link in links}
        self._readers = [
            threading.Thread(target=self._read, args=(link,), name="ferry-node", daemon=True)
            for link in links
        ]
        self._thread = threading.Thread(target=self._run, name="ferry-cluster", daemon=True)

    def start(self) -> None:
        """Start the threads."""
        for thread in [*self._readers, self._thread]:
            thread.start()

    def report(self, link: NodeLink, cause: str) -> None:
        """Say that a node is lost; from any thread."""
        self._news.put((link, cause))

    def close(self) -> None:
        """End the pool: in good order if no call is under way, at once otherwise.

        From any thread, any number of times.
        """
        if os.getpid() != self._owner:
            return  # A forked copy of this process owns none of it.
        self._closing = True
        self._news.put((None, ""))
        if threading.current_thread() not in (self._thread, *self._readers):
            self._thread.join(self._deadlines.close_s + _JOIN_SLACK_S)

    def _read(self, link: NodeLink) -> None:
        try:
            while True:
                self._handle(link, link.stream.receive())
        except EOFError:
            self.report(link, _GONE)
        except BaseException:  # noqa: BLE001 - the thread boundary; a caller would wait for ever
            self.report(link, f"what it sent could not be read\n{traceback.format_exc()}")
        finally:
            link.answers.put({"kind": "end"})

    def _handle(self, link: NodeLink, frame: Frame) -> None:
        link.heard_at = time.monotonic()
        kind = frame.fields["kind"]
        if kind == "beat":
            link.available_bytes = frame.fields["available_bytes"]
            link.idle_s = {int(rank): seconds for rank, seconds in frame.fields["idle_s"].items()}
        elif kind == "answer":
            link.answers.put(frame.fields)
        elif kind == "lost":
            self.report(link, frame.fields["message"])
        elif kind == "result":
            call = self._calls.find(frame.fields["call"])
            for index, rank in enumerate(frame.fields["ranks"]):
                if rank not in link.share.ranks:
                    raise WorkerError(f"{link.name} answered for rank {rank}")
                # The frame's memory is this message's alone, so its tensors need no copy.
                self._calls.deliver(call, rank, None if call.abandoned else frame.decode(index))

    def _run(self) -> None:
        try:
            if self._watch():
                self._shut_down()
            else:
                self._end_lost_pool()
        except BaseException:  # noqa: BLE001 - the thread boundary; a caller would wait for ever
            self._calls.refuse("its watch failed.")
            self._end_everything()
            self._calls.fail(f"the pool's watch failed; all workers were stopped.\n{traceback.format_exc()}")

    def _watch(self) -> bool:
        """Serve until the pool is to be closed (True) or is lost (False)."""
        while True:
            looked_at = time.monotonic()
            self._take_news(_TICK_S)
            if self._lost or self._cause is not None:
                return False
            if self._closing:
                return True
            self._cause = self._find_late(looked_at) or self._find_hanging() or self._find_silent()
            if self._cause is not None:
                self._abort(self._cause)
            self._tidy()

    def _take_news(self, timeout_s: float) -> None:
        try:
            link, cause = self._news.get(timeout=timeout_s)
            if link is not None:
                self._lost.setdefault(link.number, cause)
        except queue.Empty:
            pass
        try:
            for event in self._driver.events(0.0):
                if event["event"] == "ended":
                    self._ended.add(event["agent"])
                    cause = f"{_GONE}. Ray says:\n{event['error'] or 'its agent has ended'}"
                    self._lost.setdefault(event["agent"], cause)
        except WorkerError as error:
            self._driver_ended = True
            self._cause = self._cause or str(error)

    def _find_late(self, now: float) -> str | None:
        call = self._calls.late(now - _LATE_S)
        if call is None:
            return None
        ranks = ", ".join(str(rank) for rank in sorted(call.missing))
        return f"job {call.job!r} had no reply from rank {ranks} within its deadline of {call.deadline_s:g} s"

    def _find_hanging(self) -> str | None:
        """Return what hangs: calls of which every rank that could bring them on does nothing.

        One node cannot tell, because its ranks may be waiting for those of another. With NCCL waiting shows
        as work, and each node finds its own hanging ranks.
        """
        limit_s, now = self._deadlines.stall_s, time.monotonic()
        calls = self._calls.running()
        # What a node said before it took up a call says nothing about that call.
        if any(now - (call.due - call.deadline_s) < limit_s + _NEWS_S for call in calls):
            return None
        idle_s = {rank: seconds for link in self._links for rank, seconds in link.idle_s.items()}
        for jobs, ranks in connected(calls):
            if all(idle_s.get(rank, 0.0) >= limit_s for rank in ranks):
                which = ", ".join(map(str, sorted(ranks)))
                names = ", ".join(map(repr, sorted(jobs)))
                return f"job {names} hangs: worker ranks {which} were idle for {limit_s:g} s"
        return None

    def _abort(self, cause: str) -> None:
        """Have the nodes say what their ranks are doing, and give them the time for it."""
        for link in self._links:
            with contextlib.suppress(OSError):
                link.stream.send({"kind": "abort", "cause": cause})
        until = time.monotonic() + _SETTLE_S
        while len(self._lost) < len(self._links) and time.monotonic() < until and not self._driver_ended:
            self._take_news(_TICK_S)

    def _find_silent(self) -> str | None:
        now = time.monotonic()
        # Capped: while this process itself was stopped, nobody could hear the others.
        counted_s, self._looked_at = min(now - self._looked_at, 5 * _TICK_S), now
        for link in self._links:
            heard = now - link.heard_at < 1.0
            self._silent_s[link.number] = 0.0 if heard else self._silent_s[link.number] + counted_s
            if self._silent_s[link.number] > self._deadlines.heartbeat_s:
                return f"{link.name} has said nothing for {self._deadlines.heartbeat_s:.0f} s"
        return None

    def _end_lost_pool(self) -> None:
        until = time.monotonic() + (_SETTLE_S if self._only_raised() else _MOMENT_S)
        while self._cause is None and len(self._lost) < len(self._links) and time.monotonic() < until:
            before = len(self._lost)
            self._take_news(_TICK_S)
            if len(self._lost) > before and not self._only_raised():
                until = min(until, time.monotonic() + _MOMENT_S)
        message = self._compose()
        self._calls.refuse(f"the pool is lost ({message.splitlines()[0][:300]}).")
        self._end_everything()
        self._calls.fail(message)

    def _only_raised(self) -> bool:
        """Whether all that is known is exceptions, which a lost neighbour may have caused."""
        return all(_RAISED.match(cause) for cause in self._lost.values())

    def _compose(self) -> str:
        """Return the message of the ``WorkerError`` that ends all open calls."""
        doing = ", ".join(f"{call.job!r} on ranks {list(call.ranks)}" for call in self._calls.running())
        order = sorted(self._lost, key=lambda number: bool(_RAISED.match(self._lost[number])))
        headline = self._cause
        if headline is None:
            first = self._lost[order[0]]
            headline = f"{self._links[order[0]].name}: {first.splitlines()[0].partition('. Running:')[0]}"
        sections = [f"=== {self._links[number].name}: {self._lost[number]}" for number in order]
        return "\n".join(
            [
                f"{headline}. Running: {doing or 'no job'}. All workers on all {len(self._links)} nodes have "
                "been stopped; start a new pool to go on.",
                *sections,
            ]
        )

    def _shut_down(self) -> None:
        self._calls.refuse("the pool was closed.")
        if not self._calls.running():
            for link in self._links:
                with contextlib.suppress(OSError):  # gone already
                    link.stream.send({"kind": "stop"})
            until = time.monotonic() + self._deadlines.close_s
            for reader in self._readers:
                reader.join(max(0.0, until - time.monotonic()))
        self._end_everything()
        self._calls.fail("the pool was closed while this call was under way. Start a new pool.")

    def _end_everything(self) -> None:
        for link in self._links:
            link.stream.close()
        # They end their ranks and tidy up; one that is ended by Ray in the midst of it leaves a folder.
        until = time.monotonic() + _TIDY_S
        while len(self._ended) < len(self._links) and time.monotonic() < until and not self._driver_ended:
            self._take_news(_TICK_S / 2)
        self._driver.close()
        for reader in self._readers:
            if reader is not threading.current_thread() and reader.is_alive():
                reader.join(1.0)
