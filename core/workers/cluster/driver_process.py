"""This process' side of ``ray_driver``: start it, tell it what to do, hear what it says, end it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...errors import WorkerError
from ..report import describe_exit, log_tail

_SCRIPT = Path(__file__).with_name("ray_driver.py")
_CLOSE_S = 4.0
_POLL_S = 0.05
# They mean nothing to the driver; the rest (RAY_AUTH_MODE and the like) does.
_CLEARED = ("CUDA_VISIBLE_DEVICES", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


class DriverProcess:
    """A running ``ray_driver``. Used by one thread at a time."""

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix=f"comfyui-ferry-{os.getpid()}-")
        self.log_path = Path(self._directory.name, "ray_driver.log")
        self.control, theirs = socket.socketpair()
        self._received = b""
        self._events: list[dict[str, Any]] = []
        environment = {name: value for name, value in os.environ.items() if name not in _CLEARED}
        try:
            with open(self.log_path, "ab") as log, theirs:
                self.process = subprocess.Popen(
                    [sys.executable, "-P", str(_SCRIPT), "--control", str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd=self._directory.name,  # Ray puts this folder on the agents' import path
                    env=environment,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                )
        except BaseException:
            self.control.close()
            self._directory.cleanup()
            raise

    def tell(self, do: str, **values: Any) -> None:
        """Send a command."""
        with contextlib.suppress(BrokenPipeError):  # `wait_for` says how it ended
            self.control.sendall(json.dumps({"do": do, **values}).encode() + b"\n")

    def wait_for(self, event: str, *, until: float, poll: Callable[[], object] | None) -> dict[str, Any]:
        """Return the next event of this name.

        Args:
            event: Its name.
            until: When to give up, by ``time.monotonic``.
            poll: Called regularly; what it raises goes to the caller.

        Raises:
            WorkerError: If the driver says that something failed, ends, or says nothing in time.
        """
        while True:
            if poll is not None:
                poll()
            for found in self.events(_POLL_S):
                if found["event"] == event:
                    return found
                raise WorkerError(f"Ray: {found.get('message') or found.get('error') or found}")
            if time.monotonic() > until:
                raise WorkerError(f"Ray did not answer in time ({event}); its log ends with:\n{self.tail()}")

    def events(self, timeout_s: float) -> list[dict[str, Any]]:
        """Return what it has said since; one at a time, so that none is lost.

        Raises:
            WorkerError: If it has ended.
        """
        if not self._events:
            readable, _, _ = select.select([self.control], [], [], timeout_s)
            if readable:
                self._read()
        return [self._events.pop(0)] if self._events else []

    def tail(self) -> str:
        """Return the last lines of its log."""
        return log_tail(self.log_path)

    def close(self) -> None:
        """Have it end the agents and leave the cluster, and end it. May be called again."""
        self.control.close()
        try:
            self.process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._directory.cleanup()

    def _read(self) -> None:
        data = self.control.recv(1 << 16)
        *lines, self._received = (self._received + data).split(b"\n")
        self._events += [json.loads(line) for line in lines]
        if not data:
            code = self.process.wait(_CLOSE_S)
            raise WorkerError(
                f"the process that talks to Ray {describe_exit(code)}; its log ends with:\n{self.tail()}"
            )
