"""What the browser is told about the workers: started, started again, lost, out of memory; with a remedy."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass

from .running_trainings import send_event

EVENT = "ferry.workers"
_OUT_OF_MEMORY = re.compile(r"OutOfMemory|out of memory", re.IGNORECASE)
_POOL_LOST = re.compile(r"the pool is lost \((.*)\)\.?")  # as ``WorkerPool.ended_because`` says it
_AGAIN = "Queue the prompt again: new workers start by themselves."


@dataclass(frozen=True)
class WorkerNotice:
    """One thing that happened to the workers.

    Attributes:
        kind: ``starting``, ``started``, ``restarted``, ``lost``, ``out_of_memory`` or ``killed``.
        workers: How many there are.
        reason: Why they were lost, one sentence; else "".
        remedy: What to do about it; else "".
        seconds: How long the start took, None before its end.
    """

    kind: str
    workers: int
    reason: str = ""
    remedy: str = ""
    seconds: float | None = None

    def send(self) -> None:
        """Tell every browser, if a server is running."""
        send_event(EVENT, asdict(self))


def loss_notice(reason: str, workers: int) -> WorkerNotice:
    """Return the notice of workers that are gone.

    Args:
        reason: What a ``WorkerError`` or ``WorkerPool.ended_because`` says; its first line counts.
        workers: How many there were.
    """
    first = reason.strip().splitlines()[0] if reason.strip() else "the workers are gone"
    if wrapped := _POOL_LOST.fullmatch(first):
        first = wrapped[1]
    if _OUT_OF_MEMORY.search(first):
        remedy = (
            "Make the picture or video smaller, raise ulysses_degree or tensor_parallel_degree, use an fp8 "
            f"file of the model, or free that GPU. {_AGAIN}"
        )
        return WorkerNotice("out_of_memory", workers, first, remedy)
    if "SIGKILL" in first:
        remedy = (
            "If nobody ended it, the host ran out of memory: close other programs or use fewer gpus. "
            f"{_AGAIN}"
        )
        return WorkerNotice("killed", workers, first, remedy)
    remedy = f"{_AGAIN} If it happens again, run Ferry Doctor; the error on the node names the workers' logs."
    return WorkerNotice("lost", workers, first, remedy)
