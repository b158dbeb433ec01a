"""One thread for work on host memory that goes on while the target computes.

Tasks run one at a time: each is an operation over whole tensors that uses all of torch's threads by
itself. They run in the order in which they were submitted; those that may be late give way to all others.

What this module does not do: it knows nothing of gradients or optimizers.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable

import torch

Task = Callable[[], None]


class HostWorker:
    """Runs tasks in the background; the thread starts with the first one."""

    def __init__(self) -> None:
        self._tasks = _Tasks()
        self._stop: weakref.finalize | None = None

    def submit(self, task: Task) -> None:
        """Append a task; what it raises is raised by the next ``drain``."""
        self._append(task, may_be_late=False)

    def submit_late(self, task: Task) -> None:
        """Append a task that gives way to those of ``submit``; ``drain`` does not wait for it."""
        self._append(task, may_be_late=True)

    def drain(self) -> None:
        """Wait until every task is done, except those that may be late.

        Raises:
            BaseException: What the first failed task raised, once.
        """
        self._tasks.wait()

    def close(self) -> None:
        """End the thread after what was submitted; a later task starts a new one."""
        if self._stop is not None:
            self._stop()
            self._stop = None

    def _append(self, task: Task, *, may_be_late: bool) -> None:
        if self._stop is None:
            self._tasks = _Tasks()
            threading.Thread(target=_run, args=(self._tasks,), name="ferry-offload-host", daemon=True).start()
            # The thread holds the tasks only, so a forgotten worker is collected and its thread ends.
            self._stop = weakref.finalize(self, self._tasks.close)
        self._tasks.append(task, may_be_late=may_be_late)


class _Tasks:
    """What is to be done, how much of it ``drain`` waits for, and the first error."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._first: deque[Task] = deque()
        self._late: deque[Task] = deque()
        self._num_open = 0
        self._error: BaseException | None = None
        self._is_closed = False

    def append(self, task: Task, *, may_be_late: bool) -> None:
        with self._changed:
            self._num_open += not may_be_late
            (self._late if may_be_late else self._first).append(task)
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def take(self) -> tuple[Task, bool] | None:
        """Return the next task and whether it may be late, once there is one; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._first or self._late or self._is_closed)
            if self._first:
                return self._first.popleft(), False
            return (self._late.popleft(), True) if self._late else None

    def done(self, error: BaseException | None, *, may_be_late: bool) -> None:
        with self._changed:
            self._num_open -= not may_be_late
            self._error = self._error or error
            self._changed.notify_all()

    def wait(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._num_open == 0)
            error, self._error = self._error, None
        if error is not None:
            raise error


def _run(tasks: _Tasks) -> None:
    while (taken := tasks.take()) is not None:
        task, may_be_late = taken
        error = None
        try:
            with torch.no_grad():
                task()
        except BaseException as raised:  # noqa: BLE001 (the boundary of a thread: kept for `drain`)
            error = raised
        # Before the next wait: a task holds tensors, and perhaps the last reference to the worker.
        del task, taken
        tasks.done(error, may_be_late=may_be_late)
