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

from .leases import Arrival, CudaArrival, CudaLease, Lease
from .pinning import HostPinning
from .row_copies import copy_to_gpu
from .staging import Stager
from .step_clock import Mark, StepClock
from .step_timer import IdleTimer, StepTimer

# What the link gives from memory that is not pinned, as a share of what it gives from pinned memory.
_PAGEABLE_SHARE = 0.25


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
        self.timer: StepTimer = IdleTimer()
        self.moved_to_target_bytes = 0
        self.moved_to_host_bytes = 0
        self._stager: Stager | None = None

    def stage_through(self, pinning: HostPinning) -> None:
        """Take the pinned buffers through which memory that is not pinned is copied."""
        if self._stager is None:
            self._stager = Stager(self._stream, pinning)

    def stop_staging(self) -> None:
        """Give those buffers back; no copy through them may be needed any more."""
        stager, self._stager = self._stager, None
        if stager is not None:
            stager.close()

    @property
    def _stream(self) -> torch.cuda.Stream | None:
        return None

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Return new target memory, uint8 ``[nbytes]``."""
        with torch.inference_mode(False):
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def open_lease(self) -> Lease:
        """Return the bookkeeping for memory that ``allocate`` just gave."""
        return Lease()

    def start(
        self, source: torch.Tensor, destination: torch.Tensor, lease: Lease, *, is_staged: bool = False
    ) -> None:
        """Begin copying host bytes to a slot, once nobody reads what is in it.

        Args:
            source: uint8 ``[n]`` on the host, or ``[rows, columns]`` with any distance between rows.
            destination: The slot's memory, of the same shape.
            lease: The slot's bookkeeping.
            is_staged: Whether to go through the pinned buffers, if there are any; ``source`` must not
                change until somebody waits for the copy.
        """
        self.moved_to_target_bytes += source.numel()
        lease.settle()
        begin = self._begin_wait()
        if is_staged and self._stager is not None:
            lease.staged = self._stager.copy(source, destination, when_started=lambda: None)
        else:
            self._copy_now(source, destination)
        self._end_wait(begin)

    def wait(self, lease: Lease) -> None:
        """Make the current stream wait until the slot's copy is done."""
        lease.settle()

    def is_recording(self) -> bool:
        """Return whether what is launched now is recorded as a CUDA graph instead of being run."""
        return False

    def finish(self, lease: Lease) -> None:
        """Make the host wait until the slot's copy is done."""
        lease.settle()

    def retire(self, lease: Lease) -> None:
        """Note that everything launched so far was the last use of the slot's content."""
        lease.settle()

    def discard(self, memory: torch.Tensor, lease: Lease) -> None:
        """Prepare slot memory for going back to the allocator."""
        lease.settle()

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
        if self._stager is not None:
            self._stager.drain()

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

    def _begin_wait(self) -> tuple[Mark, Mark]:
        return self.clock.mark(), self.timer.mark()

    def _end_wait(self, begin: tuple[Mark, Mark]) -> None:
        self.clock.waited(begin[0])
        self.timer.waited(begin[1])

    def _copy_now(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        destination.copy_(source)


class CudaTransfer(Transfer):
    """Asynchronous copies on two streams, one for each direction of the link."""

    pageable_share = _PAGEABLE_SHARE

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.copy_stream = torch.cuda.Stream(device)
        self.gradient_stream = torch.cuda.Stream(device)

    @override
    def open_lease(self) -> Lease:
        lease = CudaLease()
        # The allocator may have taken this memory back from kernels that still run on this stream.
        lease.free_events.append(self._record_current())
        return lease

    @override
    def start(
        self, source: torch.Tensor, destination: torch.Tensor, lease: Lease, *, is_staged: bool = False
    ) -> None:
        assert isinstance(lease, CudaLease)
        self.moved_to_target_bytes += source.numel()
        lease.settle()
        for event in lease.free_events:
            self.copy_stream.wait_event(event)
        lease.free_events.clear()
        lease.readers.clear()
        if is_staged and self._stager is not None:
            lease.staged = self._stager.copy(
                source, destination, when_started=lambda: lease.copied.record(self.copy_stream)
            )
            return
        with torch.cuda.stream(self.copy_stream):
            copy_to_gpu(source, destination, self.copy_stream)
        lease.copied.record(self.copy_stream)

    @override
    def wait(self, lease: Lease) -> None:
        assert isinstance(lease, CudaLease)
        stream = torch.cuda.current_stream(self.device)
        if stream.cuda_stream not in lease.readers:
            if self.is_recording():
                return  # of a block that is in place: whoever records has waited for everything
            lease.settle()
            lease.readers[stream.cuda_stream] = stream
            begin = None if lease.copied.query() else self._begin_wait()
            stream.wait_event(lease.copied)
            if begin is not None:
                self._end_wait(begin)

    @override
    def is_recording(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    @override
    def finish(self, lease: Lease) -> None:
        assert isinstance(lease, CudaLease)
        lease.settle()
        lease.copied.synchronize()

    @override
    def retire(self, lease: Lease) -> None:
        assert isinstance(lease, CudaLease)
        lease.settle()
        current = torch.cuda.current_stream(self.device)
        readers = {**lease.readers, current.cuda_stream: current}
        lease.free_events = [stream.record_event() for stream in readers.values()]

    @override
    def discard(self, memory: torch.Tensor, lease: Lease) -> None:
        assert isinstance(lease, CudaLease)
        lease.settle()
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
        return CudaArrival(self.gradient_stream)

    @override
    def finish_gradients(self) -> None:
        self.gradient_stream.synchronize()

    @override
    def synchronize(self) -> None:
        super().synchronize()
        self.copy_stream.synchronize()
        self.gradient_stream.synchronize()

    @property
    @override
    def _stream(self) -> torch.cuda.Stream | None:
        return self.copy_stream

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
