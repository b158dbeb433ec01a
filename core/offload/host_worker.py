"""One thread for work on host memory that goes on while the target computes.

Tasks run in the order in which they were submitted, one at a time: each is an operation over whole
tensors that uses all of torch's threads by itself.

What this module does not do: it knows nothing of gradients or optimizers.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable

import torch

Task = Callable[[], None]


class HostWorker:
    """Runs tasks in the background; the thread starts with the first one."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._outcome = _Outcome()
        self._stop: weakref.finalize | None = None

    def submit(self, task: Task) -> None:
        """Append a task; what it raises is raised by the next ``drain``."""
        if self._stop is None:
            arguments = (self._tasks, self._outcome)
            threading.Thread(target=_run, args=arguments, name="ferry-offload-host", daemon=True).start()
            # The thread holds the queue only, so a forgotten worker is collected and its thread ends.
            self._stop = weakref.finalize(self, self._tasks.put, None)
        self._outcome.submitted()
        self._tasks.put(task)

    def drain(self) -> None:
        """Wait until every task is done.

        Raises:
            BaseException: What the first failed task raised, once.
        """
        self._outcome.wait()

    def close(self) -> None:
        """End the thread after what was submitted; a later task starts a new one."""
        if self._stop is not None:
            self._stop()
            self._stop = None


class _Outcome:
    """How many tasks are open, and the first error."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_open = 0
        self._error: BaseException | None = None

    def submitted(self) -> None:
        with self._changed:
            self._num_open += 1

    def done(self, error: BaseException | None) -> None:
        with self._changed:
            self._num_open -= 1
            self._error = self._error or error
            self._changed.notify_all()

    def wait(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._num_open == 0)
            error, self._error = self._error, None
        if error is not None:
            raise error


def _run(tasks: queue.SimpleQueue[Task | None], outcome: _Outcome) -> None:
    while (task := tasks.get()) is not None:
        error = None
        try:
            with torch.no_grad():
                task()
        except BaseException as raised:  # noqa: BLE001 (the boundary of a thread: kept for `drain`)
            error = raised
        # Before the next wait: a task holds tensors, and perhaps the last reference to the worker.
        del task
        outcome.done(error)
