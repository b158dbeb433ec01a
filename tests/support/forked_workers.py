"""Worker processes forked from the test process instead of started afresh.

They run the real `bootstrap` and everything behind it, in real processes of their own session, but
import nothing anew, so that a fault can be tried at every phase in tenths of a second. A test of how a
process is *started* (its path, its environment, a parent that dies) needs the real thing.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import subprocess
import sys
import time
import traceback
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from comfyui_ferry.core.workers import bootstrap, launcher


class ForkedProcess:
    """The part of `subprocess.Popen` that the launcher uses."""

    def __init__(self, command: list[str], *, stdout: Any, env: dict[str, str], pass_fds: tuple, **_: Any):
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            _become_worker(command, stdout.fileno(), env, pass_fds)

    def poll(self) -> int | None:
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # another thread collected it
                return self.returncode
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float) -> int:
        until = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() >= until:
                raise subprocess.TimeoutExpired("forked worker", timeout)
            time.sleep(0.005)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def install(monkeypatch: Any) -> None:
    """Have the launcher fork until `monkeypatch` is undone."""
    torch.set_num_threads(1)  # a fork has none of OpenMP's threads
    names = {"DEVNULL": subprocess.DEVNULL, "TimeoutExpired": subprocess.TimeoutExpired}
    monkeypatch.setattr(launcher, "subprocess", types.SimpleNamespace(Popen=ForkedProcess, **names))


@contextlib.contextmanager
def forking() -> Iterator[None]:
    """Have the launcher fork, for a whole file of tests; a group that runs already is stopped first."""
    from comfyui_ferry.core.comfy_adapter import close_workers

    close_workers()
    with pytest.MonkeyPatch.context() as patch:
        install(patch)
        yield
        close_workers()


@contextlib.contextmanager
def starting_afresh() -> Iterator[None]:
    """Inside `forking()`, have the launcher start real processes; a running group is stopped first."""
    from comfyui_ferry.core.comfy_adapter import close_workers

    close_workers()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launcher, "subprocess", subprocess)
        yield


def _become_worker(command: list[str], log: int, env: dict[str, str], pass_fds: tuple) -> None:
    try:
        # What is garbage of the test process must not be finalized here: its descriptors are others by now.
        gc.freeze()
        os.setsid()
        for target in (1, 2):
            os.dup2(log, target)
        kept = sorted({0, 1, 2, *pass_fds})
        for first, last in zip(kept, [*kept[1:], 1 << 16], strict=True):
            os.closerange(first + 1, last)
        os.environ.clear()
        os.environ.update(env)
        sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))
        logging.getLogger().handlers.clear()
        sys.argv = command[command.index(bootstrap.__file__) :]
        bootstrap.main()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)
