"""What is kept of a copy while it may be running: for a slot, and for a gradient on its way home.

What this module does not do: it copies nothing; ``transfer`` does.
"""

from __future__ import annotations

import torch
from typing_extensions import override

from .staging import StagedCopy


class Lease:
    """The bookkeeping of one slot: its streams (on CUDA), and a copy that a thread may be starting."""

    def __init__(self) -> None:
        self.staged: StagedCopy | None = None

    def settle(self) -> None:
        """Wait until the slot's last copy is on its stream.

        Raises:
            BaseException: What kept it from getting there.
        """
        staged = self.staged
        if staged is None:
            return
        try:
            staged.wait()
        finally:
            # Only now: two threads may settle one lease, and neither may go on before the copy is there.
            if self.staged is staged:
                self.staged = None


class Arrival:
    """Says when bytes that were sent to the host can be read there; on the CPU at once."""

    def wait(self) -> None:
        """Return once they are there."""

    def is_over(self) -> bool:
        """Return whether they are there."""
        return True


class CudaArrival(Arrival):
    """An event on the stream that sends them."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        # Blocking: a spinning wait would take a core from the optimizer.
        self._event = torch.cuda.Event(blocking=True)
        self._event.record(stream)

    @override
    def wait(self) -> None:
        self._event.synchronize()

    @override
    def is_over(self) -> bool:
        return self._event.query()


class CudaLease(Lease):
    """Who reads the slot, and what its next copy has to wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.copied = torch.cuda.Event()
        self.readers: dict[int, torch.cuda.Stream] = {}
        self.free_events: list[torch.Event] = []
