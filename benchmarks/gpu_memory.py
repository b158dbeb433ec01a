"""GPU memory that PyTorch's own peak does not show."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


def graph_pool_bytes() -> int:
    """Return the memory kept for CUDA graphs, which counts as allocated only while they are recorded."""
    segments = torch.cuda.memory_snapshot() if torch.cuda.is_available() else []
    return sum(segment["total_size"] for segment in segments if segment["segment_pool_id"] != (0, 0))


class PeakOutsideGraphs:
    """The highest of PyTorch's peaks, without what was allocated while a CUDA graph was recorded.

    That memory lies in the graphs' pool; added to ``graph_pool_bytes`` it would count twice.

    Attributes:
        nbytes: The peak before the last recording; ``read`` takes what came later into account.
    """

    def __init__(self) -> None:
        self.nbytes = 0

    def read(self) -> int:
        """Return the peak so far, and begin a new one."""
        self.nbytes = max(self.nbytes, torch.cuda.max_memory_allocated())
        torch.cuda.reset_peak_memory_stats()
        return self.nbytes

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Leave out every recording that is made in the body, and see through resets of PyTorch's peak."""
        peak = self
        begin, end = torch.cuda.CUDAGraph.capture_begin, torch.cuda.CUDAGraph.capture_end
        reset = torch.cuda.reset_peak_memory_stats

        def capture_begin(self: torch.cuda.CUDAGraph, *args: object, **options: object) -> None:
            peak.read()
            begin(self, *args, **options)  # pyright: ignore[reportArgumentType]

        def capture_end(self: torch.cuda.CUDAGraph) -> None:
            end(self)
            reset()

        def reset_peak(*device: object) -> None:
            peak.nbytes = max(peak.nbytes, torch.cuda.max_memory_allocated())
            reset(*device)  # pyright: ignore[reportArgumentType]

        torch.cuda.reset_peak_memory_stats = reset_peak
        torch.cuda.CUDAGraph.capture_begin = capture_begin
        torch.cuda.CUDAGraph.capture_end = capture_end
        try:
            yield
        finally:
            torch.cuda.CUDAGraph.capture_begin, torch.cuda.CUDAGraph.capture_end = begin, end
            torch.cuda.reset_peak_memory_stats = reset
