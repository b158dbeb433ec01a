"""How long a rank waits for other ranks inside one forward.

The collectives and the ring's transfers ask ``current_timer`` and mark the time around each wait. On CUDA a
mark is an event on the computing stream, so nothing waits for the host; what overlaps with computing is no
wait and does not count. Without a timer nothing is recorded.
"""

from __future__ import annotations

import contextlib
import contextvars
import time
from collections.abc import Iterator

import torch

_current: contextvars.ContextVar[ExchangeTimer | None] = contextvars.ContextVar("ferry_timer", default=None)


class ExchangeTimer:
    """Adds up the waits of the forward that runs inside ``active``."""

    def __init__(self) -> None:
        self._host_s, self._waits = 0.0, 0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Record the waits of this thread."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    @contextlib.contextmanager
    def waiting(self, device: torch.device) -> Iterator[None]:
        """Count the time of what runs inside, on the current stream of ``device`` or on the host."""
        if device.type != "cuda":
            start_s = time.perf_counter()
            try:
                yield
            finally:
                self._host_s += time.perf_counter() - start_s
                self._waits += 1
            return
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record(torch.cuda.current_stream(device))
        yield
        stop.record(torch.cuda.current_stream(device))
        self._events.append((start, stop))

    def seconds(self) -> float | None:
        """Return the sum, None if no wait was seen (none was made, or a compiled forward made them).

        On CUDA the host waits until the device has got to the end of the last wait.
        """
        if not self._events and not self._waits:
            return None
        for _, stop in self._events:
            stop.synchronize()
        return self._host_s + sum(start.elapsed_time(stop) for start, stop in self._events) / 1000


def waiting(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Count the time inside as waiting for other ranks, if a timer is active in this thread."""
    if torch.compiler.is_compiling() or _is_captured(device):
        return contextlib.nullcontext()
    timer = _current.get()
    return contextlib.nullcontext() if timer is None else timer.waiting(device)


def _is_captured(device: torch.device) -> bool:
    """Return whether the calls are recorded for a CUDA graph, where events tell no time."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
