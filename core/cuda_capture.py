"""Record what a call launches as a CUDA graph, in a pool of memory that several recordings share.

Unlike ``torch.cuda.graph`` it collects no garbage, which for all blocks of a model takes half a minute, and
after an error in the call it raises that error, not the one that ends the broken recording, and is back on
the stream that was current before.

Source: CUDA graphs, https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch

R = TypeVar("R")


class CudaCapture:
    """Records calls on one stream, into one pool: they run one at a time, none needs what an earlier left."""

    def __init__(self) -> None:
        self._pool: Any = None
        self._stream: Any = None

    def __call__(self, call: Callable[[], R]) -> tuple[Callable[[], None], R]:
        """Record ``call`` without running its kernels.

        Args:
            call: Works on tensors of the current CUDA device, which stay where they are.

        Returns:
            What launches it again, and what it returned: tensors that a replay writes.

        Raises:
            RuntimeError: If it cannot be recorded. Later calls use a new pool then.
        """
        if self._pool is None:
            self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # nothing can be given back while recording
        try:
            with torch.cuda.stream(self._stream):
                # Other threads (NCCL's watchdog) may go on asking CUDA for the state of their own events.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    output = call()
                except BaseException:
                    with contextlib.suppress(RuntimeError):
                        graph.capture_end()
                    raise
                graph.capture_end()
        except BaseException:
            self._pool = None
            raise
        return graph.replay, output

    def pool_bytes(self) -> int:
        """Return the memory of the pool, which PyTorch's peaks do not count while graphs are replayed."""
        if self._pool is None:
            return 0
        segments = torch.cuda.memory_snapshot()
        return sum(each["total_size"] for each in segments if each["segment_pool_id"] == tuple(self._pool))
