"""One node of a running pool, seen from the parent."""

from __future__ import annotations

import queue
import time
from dataclasses import dataclass, field
from typing import Any

from .placement import Share
from .stream import Stream

_ANSWER_S = 20.0


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

    @property
    def name(self) -> str:
        """What messages call it."""
        ranks = self.share.ranks
        which = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
        return f"node {self.share.address} ({which})"

    def ask(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Send a message and wait for its answer; by one thread at a time.

        Raises:
            EOFError: If the node is gone or does not answer.
            OSError: If it is gone.
        """
        self.stream.send(fields)
        try:
            answer = self.answers.get(timeout=_ANSWER_S)
        except queue.Empty:
            raise EOFError(f"{self.name} does not answer") from None
        if answer["kind"] != "answer":
            raise EOFError(f"{self.name} is gone")
        return answer
