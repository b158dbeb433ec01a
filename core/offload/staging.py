"""Copies from host memory that is not pinned, through small pinned buffers.

CUDA copies pageable memory itself, but holds the calling thread up for it and is slow. Here a thread
fills one buffer while the one before is on its way; whoever needs the bytes waits for the thread only if
it is not that far yet.

What this module does not do: it decides neither what moves nor what is pinned.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable

import torch

from .host_worker import HostWorker
from .pinned_arena import PinnedArena
from .pinning import HostPinning

BUFFER_BYTES = 16 * 2**20
NUM_BUFFERS = 3


class StagedCopy:
    """A copy that a thread is starting."""

    def __init__(self) -> None:
        self._started = threading.Event()
        self._error: BaseException | None = None

    def finish(self, error: BaseException | None) -> None:
        """Note that everything is on the stream, or why not."""
        self._error = error
        self._started.set()

    def wait(self) -> None:
        """Wait until everything is on the stream.

        Raises:
            BaseException: What the thread met.
        """
        self._started.wait()
        if self._error is not None:
            raise self._error


class PinnedBuffer:
    """One pinned buffer; ``sent`` is recorded behind the last copy from it."""

    def __init__(self, memory: torch.Tensor, is_cuda: bool) -> None:
        self.memory = memory
        self.sent = torch.cuda.Event() if is_cuda else None

    def wait(self) -> None:
        """Wait until that copy is over."""
        if self.sent is not None:
            self.sent.synchronize()

    def note_sent(self, stream: torch.cuda.Stream | None) -> None:
        """Record that a copy from here was just started."""
        if self.sent is not None and stream is not None:
            self.sent.record(stream)


class Stager:
    """Copies in the order in which they are asked for.

    Args:
        stream: The stream of the copies; None for the target ``cpu``.
        pinning: Pins the buffers, which are taken at once, before other memory uses the limit up.
    """

    def __init__(self, stream: torch.cuda.Stream | None, pinning: HostPinning) -> None:
        self._stream = stream
        buffer_bytes = BUFFER_BYTES
        self._arena = PinnedArena([buffer_bytes] * NUM_BUFFERS, pin=pinning)
        memory = [self._arena.allocate(buffer_bytes).tensor(0, buffer_bytes) for _ in range(NUM_BUFFERS)]
        for each in memory:
            each.zero_()  # commits the pages
        self._arena.seal()
        self._buffers = itertools.cycle([PinnedBuffer(each, stream is not None) for each in memory])
        self._buffer_bytes = buffer_bytes
        self._worker = HostWorker()

    def copy(
        self, source: torch.Tensor, destination: torch.Tensor, *, when_started: Callable[[], None]
    ) -> StagedCopy:
        """Begin copying ``source``, uint8 on the host, to ``destination``.

        What the stream has to wait for must be on it already; ``when_started`` is called, in the
        thread, once the last part is on it. ``source`` must not change until then.
        """
        copied = StagedCopy()

        def run() -> None:
            try:
                self._run(source, destination)
                when_started()
            except BaseException as error:
                copied.finish(error)
                raise
            copied.finish(None)

        self._worker.submit(run)
        return copied

    def drain(self) -> None:
        """Wait until every copy is on the stream; errors were raised where the bytes were needed."""
        barrier = StagedCopy()
        self._worker.submit(lambda: barrier.finish(None))
        barrier.wait()

    def close(self) -> None:
        """End the thread and unpin the buffers; no copy may be running."""
        self.drain()
        self._worker.close()
        for _ in range(NUM_BUFFERS):
            next(self._buffers).wait()
        self._arena.unpin()

    def _run(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        for start in range(0, source.numel(), self._buffer_bytes):
            part = source[start : start + self._buffer_bytes]
            buffer = next(self._buffers)
            buffer.wait()
            staged = buffer.memory[: part.numel()]
            staged.copy_(part)
            with torch.cuda.stream(self._stream):
                destination[start : start + part.numel()].copy_(staged, non_blocking=True)
            buffer.note_sent(self._stream)
