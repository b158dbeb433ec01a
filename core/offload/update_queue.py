"""Steps of masters that may be done after ``optimizer.step()``, until the next forward needs them.

A queued step is done when nothing more urgent is: first one that somebody waits for, then, of those whose
gradients have arrived, the one whose bucket the next forward needs first. Whoever needs a bucket finishes
its step before: it waits, and learns of what went wrong.

What this module does not do: it computes nothing, and does not know who needs a bucket; the engine does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

import torch

from .buckets import Bucket
from .host_worker import HostWorker
from .master_steps import MasterStep
from .tensors import ManagedTensor
from .transfer import Transfer
from .unobserved import uncompiled

_NO_TASK = -1


class QueuedStep:
    """One step that waits for its turn, for as long as its bucket's ``update`` is this.

    Args:
        queue: Where it waits.
        step: What is to be done.
        place: The bucket's place in a forward.
    """

    def __init__(self, queue: UpdateQueue, step: MasterStep, place: int) -> None:
        self.step = step
        self.place = place
        self.is_wanted = False
        self.is_over = False
        self.error: BaseException | None = None
        self._queue = queue

    def finish(self) -> None:
        """Wait until the step is done; the next one to be done is this.

        Raises:
            BaseException: What it raised, once.
            OffloadError: If what it reads or writes was written meanwhile.
        """
        self._queue.finish(self)


class UpdateQueue:
    """Does queued steps in a worker's free time.

    Args:
        worker: Does them, when it has nothing else to do.
        transfer: Makes sure that no copy still reads what changes.
        place_of: Returns the place of a bucket in the last forward.
    """

    def __init__(self, worker: HostWorker, transfer: Transfer, place_of: Callable[[Bucket], int]) -> None:
        self._worker = worker
        self._transfer = transfer
        self._place_of = place_of
        self._changed = threading.Condition()
        self._waiting: list[QueuedStep] = []
        self._open: list[QueuedStep] = []

    def add(self, step: MasterStep) -> None:
        """Queue a step; its bucket must not have one."""
        assert step.bucket.update is None
        queued = QueuedStep(self, step, self._place_of(step.bucket))
        with self._changed:
            self._waiting.append(queued)
            self._open.append(queued)
            step.bucket.update = queued
        self._worker.submit_late(self._run_next)

    def finish_for(self, bucket: Bucket) -> None:
        """Let the bucket's step end before its masters are read; a backward sees what it began with."""
        queued = bucket.update
        if queued is not None and torch._C._current_graph_task_id() == _NO_TASK:
            queued.finish()

    @uncompiled
    def finish_entries(self, entries: Iterable[ManagedTensor]) -> None:
        """Do that for the buckets of several tensors."""
        if self._open:
            for managed in entries:
                self.finish_for(managed.bucket)

    def finish(self, queued: QueuedStep) -> None:
        """Wait for one step; see ``QueuedStep.finish``."""
        with self._changed:
            queued.is_wanted = True
            self._changed.wait_for(lambda: queued.is_over)
            if queued not in self._open:
                return  # another thread was told of it
            self._close([queued])
        _report([queued])

    def finish_all(self) -> None:
        """Wait for every step.

        Raises:
            BaseException: What the first failed one raised, once.
            OffloadError: If what one reads or writes was written meanwhile.
        """
        if not self._open:
            return
        with self._changed:
            self._changed.wait_for(lambda: all(queued.is_over for queued in self._open))
            done = list(self._open)
            self._close(done)
        _report(done)

    def _close(self, done: list[QueuedStep]) -> None:
        for queued in done:
            self._open.remove(queued)
            queued.step.bucket.update = None

    def _run_next(self) -> None:
        with self._changed:
            queued = self._choose()
            self._waiting.remove(queued)
        try:
            queued.step.run(self._transfer)
        except BaseException as raised:  # noqa: BLE001 (the boundary of a thread: kept for `finish`)
            queued.error = raised
        finally:
            with self._changed:
                queued.is_over = True
                self._changed.notify_all()

    def _choose(self) -> QueuedStep:
        ready = [queued for queued in self._waiting if queued.is_wanted or queued.step.has_arrived()]
        if not ready:
            return self._waiting[0]  # the first that was sent
        return min(ready, key=lambda queued: (not queued.is_wanted, queued.place))


def _report(done: list[QueuedStep]) -> None:
    for queued in done:
        if queued.error is not None:
            raise queued.error
    for queued in done:
        queued.step.check_untouched()
