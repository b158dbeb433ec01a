"""Every exception the pack raises.

Each message says what was asked (with its value), the limit that it met, and the way out, so that
a person at the canvas can act on it. Nothing here warns and goes on.
"""

from __future__ import annotations


class FerryError(Exception):
    """Base of all errors raised by ComfyUI-Ferry."""


class RequestError(FerryError, ValueError):
    """A request that cannot be honoured; raised before any process starts or file is written.

    Args:
        asked: What was asked for, with the value received.
        limit: The limit it met.
        way_out: What the caller can do instead.
    """

    def __init__(self, asked: str, *, limit: str, way_out: str) -> None:
        self.asked = asked
        self.limit = limit
        self.way_out = way_out
        super().__init__(f"{asked.rstrip('.')}. {limit.rstrip('.')}. {way_out.rstrip('.')}.")


class PlanError(FerryError, RuntimeError):
    """A parallel plan does not fit the model that it was applied to, or the run broke its contract."""


class OffloadError(FerryError, RuntimeError):
    """The offload engine met a state in which it cannot stay exact."""


class WorkerError(FerryError, RuntimeError):
    """A worker process raised, died or did not answer; the message holds that rank's traceback."""


class TrainingError(FerryError, RuntimeError):
    """Training cannot go on without being silently wrong (a NaN loss, an adapter that never learns)."""


class SaveError(FerryError, RuntimeError):
    """A file that was just written did not read back as what was meant to be saved."""
