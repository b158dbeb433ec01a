"""Copies between host and target, and the order of streams around them.

On CUDA the host-to-device copies have a stream of their own. Two rules make a slot safe to reuse:
the copy stream waits until every stream that read the slot's last content is done with it, and a
stream that reads the new content waits for the copy. No streamed byte lives in memory that the
caching allocator could hand to somebody else meanwhile.

``start`` and ``wait`` are separate so that a copy can be started ahead of its use.

What this module does not do: it decides neither what moves nor when.
"""

from __future__ import annotations

import statistics
import time

import torch
from typing_extensions import override

from .step_clock import Mark, StepClock
from .step_timer import StepTimer

# What the link gives from memory that is not pinned, as a share of what it gives from pinned memory.
_PAGEABLE_SHARE = 0.25


class Lease:
    """The stream bookkeeping of one slot; on the CPU there is nothing to keep."""


class Arrival:
    """Says when bytes that were sent to the host can be read there; on the CPU at once."""

    def wait(self) -> None:
        """Return once they are there."""


class Transfer:
    """Synchronous copies, for the target ``cpu``.

    Attributes:
        clock: Times steps, and their waiting for copies.
        timer: Who else wants to know how long passes wait for copies.
        pageable_share: Rate of copies from unpinned memory, by that of pinned.
    """

    pageable_share = 1.0

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.clock = StepClock(device)
        self.timer: StepTimer | None = None
        self.moved_to_target_bytes = 0
        self.moved_to_host_bytes = 0

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Return new target memory, uint8 ``[nbytes]``."""
        with torch.inference_mode(False):
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def open_lease(self) -> Lease:
        """Return the bookkeeping for memory that ``allocate`` just gave."""
        return Lease()

    def start(self, source: torch.Tensor, destination: torch.Tensor, lease: Lease) -> None:
        """Begin copying host bytes to a slot, once nobody reads what is in it."""
        self.moved_to_target_bytes += source.numel()
        begin = self._begin_wait()
        self._copy_now(source, destination)
        self._end_wait(begin)

    def wait(self, lease: Lease) -> None:
        """Make the current stream wait until the slot's copy is done."""

    def finish(self, lease: Lease) -> None:
        """Make the host wait until the slot's copy is done."""

    def retire(self, lease: Lease) -> None:
        """Note that everything launched so far was the last use of the slot's content."""

    def discard(self, memory: torch.Tensor, lease: Lease) -> None:
        """Prepare slot memory for going back to the allocator."""

    def write_back(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        """Copy changed target bytes to the host; they are there when this returns."""
        self.moved_to_host_bytes += source.numel()
        destination.copy_(source)

    def move_resident(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        """Copy bytes of the resident set to the target, from any device."""
        self.moved_to_target_bytes += source.numel()
        destination.copy_(source)

    def send_gradient(self, gradient: torch.Tensor, host: torch.Tensor) -> Arrival:
        """Begin copying a gradient to the host; the arrival, or ``finish_gradients``, makes it readable."""
        self.moved_to_host_bytes += gradient.numel() * gradient.dtype.itemsize
        with torch.no_grad():
            host.copy_(gradient)
        return Arrival()

    def finish_gradients(self) -> None:
        """Wait until every gradient that was sent is on the host."""

    def synchronize(self) -> None:
        """Wait for every copy, before host memory is unpinned."""

    def measure_link(self, source: torch.Tensor, *, num_copies: int) -> float:
        """Return the bytes a second of a copy of ``source`` to the target, the median of several."""
        destination = self.allocate(source.numel())
        seconds = []
        for _ in range(num_copies):
            self.synchronize()
            begin = time.perf_counter()
            self._copy_now(source, destination)
            seconds.append(time.perf_counter() - begin)
        return max(1, source.numel()) / max(statistics.median(seconds), 1e-9)

    @property
    def moved_bytes(self) -> tuple[int, int]:
        """Bytes copied so far, to the target and to the host."""
        return self.moved_to_target_bytes, self.moved_to_host_bytes

    def _begin_wait(self) -> tuple[Mark, Mark | None]:
        return self.clock.mark(), None if self.timer is None else self.timer.mark()

    def _end_wait(self, begin: tuple[Mark, Mark | None]) -> None:
        self.clock.waited(begin[0])
        if self.timer is not None and begin[1] is not None:
            self.timer.waited(begin[1])

    def _copy_now(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        destination.copy_(source)


class _CudaArrival(Arrival):
    def __init__(self, stream: torch.cuda.Stream) -> None:
        # Blocking: a spinning wait would take a core from the optimizer.
        self._event = torch.cuda.Event(blocking=True)
        self._event.record(stream)

    @override
    def wait(self) -> None:
        self._event.synchronize()


class _CudaLease(Lease):
    def __init__(self) -> None:
        self.copied = torch.cuda.Event()
        self.readers: dict[int, torch.cuda.Stream] = {}
        self.free_events: list[torch.Event] = []


class CudaTransfer(Transfer):
    """Asynchronous copies on two streams, one for each direction of the link."""

    pageable_share = _PAGEABLE_SHARE

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.copy_stream = torch.cuda.Stream(device)
        self.gradient_stream = torch.cuda.Stream(device)

    @override
    def open_lease(self) -> Lease:
        lease = _CudaLease()
        # The allocator may have taken this memory back from kernels that still run on this stream.
        lease.free_events.append(self._record_current())
        return lease

    @override
    def start(self, source: torch.Tensor, destination: torch.Tensor, lease: Lease) -> None:
        assert isinstance(lease, _CudaLease)
        self.moved_to_target_bytes += source.numel()
        for event in lease.free_events:
            self.copy_stream.wait_event(event)
        lease.free_events.clear()
        lease.readers.clear()
        with torch.cuda.stream(self.copy_stream):
            destination.copy_(source, non_blocking=True)
        lease.copied.record(self.copy_stream)

    @override
    def wait(self, lease: Lease) -> None:
        assert isinstance(lease, _CudaLease)
        stream = torch.cuda.current_stream(self.device)
        if stream.cuda_stream not in lease.readers:
            lease.readers[stream.cuda_stream] = stream
            begin = None if lease.copied.query() else self._begin_wait()
            stream.wait_event(lease.copied)
            if begin is not None:
                self._end_wait(begin)

    @override
    def finish(self, lease: Lease) -> None:
        assert isinstance(lease, _CudaLease)
        lease.copied.synchronize()

    @override
    def retire(self, lease: Lease) -> None:
        assert isinstance(lease, _CudaLease)
        current = torch.cuda.current_stream(self.device)
        readers = {**lease.readers, current.cuda_stream: current}
        lease.free_events = [stream.record_event() for stream in readers.values()]

    @override
    def discard(self, memory: torch.Tensor, lease: Lease) -> None:
        assert isinstance(lease, _CudaLease)
        for stream in (self.copy_stream, *lease.readers.values()):
            memory.record_stream(stream)

    @override
    def write_back(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        self.moved_to_host_bytes += source.numel()
        destination.copy_(source)  # blocking: the host reads masters without asking

    @override
    def send_gradient(self, gradient: torch.Tensor, host: torch.Tensor) -> Arrival:
        self.moved_to_host_bytes += gradient.numel() * gradient.dtype.itemsize
        self.gradient_stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.no_grad(), torch.cuda.stream(self.gradient_stream):
            host.copy_(gradient, non_blocking=True)
        gradient.record_stream(self.gradient_stream)
        return _CudaArrival(self.gradient_stream)

    @override
    def finish_gradients(self) -> None:
        self.gradient_stream.synchronize()

    @override
    def synchronize(self) -> None:
        self.copy_stream.synchronize()
        self.gradient_stream.synchronize()

    @override
    def _copy_now(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        with torch.cuda.stream(self.copy_stream):
            destination.copy_(source, non_blocking=True)
        self.copy_stream.synchronize()

    def _record_current(self) -> torch.Event:
        return torch.cuda.current_stream(self.device).record_event()


def make_transfer(device: torch.device) -> Transfer:
    """Return the transfer for the target device."""
    return CudaTransfer(device) if device.type == "cuda" else Transfer(device)
