"""Moments on a device's computing stream, or of the host's clock, and the time between two of them.

On CUDA a mark is an event: making one waits for nothing, and it can be read when the device has got there.
"""

from __future__ import annotations

import time

import torch

Mark = float | torch.cuda.Event


def mark_now(device: torch.device) -> Mark:
    """Return this moment of the current stream of ``device``; of the host's clock if it is no GPU."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def is_over(mark: Mark) -> bool:
    """Return whether the device has got to ``mark``."""
    return mark.query() if isinstance(mark, torch.cuda.Event) else True


def seconds_between(start: Mark, stop: Mark) -> float:
    """Return the seconds from ``start`` to ``stop``, both over and of one device."""
    if isinstance(start, torch.cuda.Event) and isinstance(stop, torch.cuda.Event):
        return start.elapsed_time(stop) / 1000
    assert isinstance(start, float) and isinstance(stop, float)
    return stop - start
