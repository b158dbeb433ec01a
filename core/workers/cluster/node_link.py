"""One node of a running pool, seen from the parent."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from .placement import Share
from .stream import Stream

_ANSWER_S = 20.0
_LOOK_S = 0.1


class NodeSilentError(Exception):
    """A node that is there has not answered."""


@dataclass
class NodeLink:
    """A node's agent.

    Attributes:
        number: Its number in the pool.
        share: Which node it is and which ranks it runs.
        stream: The connection to it.
        devices: Device of each of its ranks.
        available_bytes: Host memory that the node has left, as it last said.
        idle_s: For how long each of its ranks has done nothing although a call waits, as it last said.
        heard_at: When it last said anything, by ``time.monotonic``.
        answers: What it answered to ``ask``.
    """

    number: int
    share: Share
    stream: Stream
    devices: list[str]
    available_bytes: int
    idle_s: dict[int, float] = field(default_factory=dict)
    heard_at: float = field(default_factory=time.monotonic)
    answers: queue.SimpleQueue[dict[str, Any]] = field(default_factory=queue.SimpleQueue)
    _asked: int = 0

    @property
    def name(self) -> str:
        """What messages call it."""
        ranks = self.share.ranks
        which = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
        return f"node {self.share.address} ({which})"

    def ask(self, fields: dict[str, Any], *, stop: threading.Event | None = None) -> dict[str, Any]:
        """Send a message and wait for its answer; by one thread at a time.

        Args:
            fields: The message.
            stop: Set to give up at once.

        Raises:
            EOFError: If the node is gone.
            OSError: If it is gone.
            NodeSilentError: If it does not answer in time, or ``stop`` was set. An answer that comes later is
                not taken for another question's.
        """
        self._asked += 1
        self.stream.send(fields | {"question": self._asked})
        until = time.monotonic() + _ANSWER_S
        while time.monotonic() < until and not (stop is not None and stop.is_set()):
            with contextlib.suppress(queue.Empty):
                answer = self.answers.get(timeout=_LOOK_S)
                if answer["kind"] != "answer":
                    self.answers.put(answer)  # for whoever asks next
                    raise EOFError(f"{self.name} is gone")
                if answer["question"] == self._asked:
                    return answer
        raise NodeSilentError(f"{self.name} has not answered for {_ANSWER_S:g} s; it may be overloaded")
