"""Record a model's forward as a CUDA graph and replay it: the host then issues one launch a step.

A forward of many small kernels is limited by the host that launches them, the more so the more GPUs
share the work. A recording holds for one shape of the inputs and one set of weights in memory: the
first call of a shape runs as it is, the second is recorded, later ones replay it. Collectives are
recorded with the rest. The kernels, hence the results, are those of the forward as it is.

What this module does not do: it never looks inside the forward. One that depends on the values of its
tensors on the host cannot be recorded, and is refused.

Source: CUDA graphs, https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import PlanError, RequestError

Arguments = dict[str, Any]
Recorder = Callable[[Callable[[], Any]], tuple[Callable[[], None], Any]]

# A positive and a negative prompt of other lengths are two shapes; so many prompts may alternate.
_MAX_RECORDINGS = 4
# Shapes that were seen once, of which nothing is kept but the name.
_MAX_SEEN = 64


@dataclass(frozen=True)
class _Recording:
    """One recorded forward.

    Args:
        inputs: The tensors that it reads.
        replay: Runs it again.
        output: Where its results are.
    """

    inputs: list[torch.Tensor]
    replay: Callable[[], None]
    output: Any


class RecordedForward:
    """Calls a forward, and replays it where its inputs have a shape that was seen before.

    Args:
        forward: Called with the arguments by name; tensors on one device. All ranks of its groups must
            make the same calls.
        record: Records a call: returns what runs it again, and its output.
    """

    def __init__(self, forward: Callable[[Arguments], Any], *, record: Recorder | None = None) -> None:
        self.forward = forward
        self._record = _CudaRecorder() if record is None else record
        self._recordings: OrderedDict[Hashable, _Recording] = OrderedDict()
        self._seen: OrderedDict[Hashable, None] = OrderedDict()

    def __call__(self, arguments: Arguments) -> Any:
        """Return the forward's output for ``arguments``; valid until the next call.

        Raises:
            RequestError: If the forward cannot be recorded.
        """
        tensors: list[torch.Tensor] = []
        key = _describe(arguments, tensors)
        if key in self._recordings:
            self._recordings.move_to_end(key)
            recording = self._recordings[key]
            for static, tensor in zip(recording.inputs, tensors, strict=True):
                static.copy_(tensor)
        elif key in self._seen:
            recording = self._recordings[key] = self._recorded(arguments, tensors)
            if len(self._recordings) > _MAX_RECORDINGS:
                self._recordings.popitem(last=False)
        else:
            self._seen[key] = None
            if len(self._seen) > _MAX_SEEN:
                self._seen.popitem(last=False)
            return self.forward(arguments)
        recording.replay()
        return recording.output

    def clear(self) -> None:
        """Drop all recordings: to be called when a weight has other memory, or anything else changed."""
        self._recordings.clear()
        self._seen.clear()

    def _recorded(self, arguments: Arguments, tensors: list[torch.Tensor]) -> _Recording:
        static = [tensor.clone() for tensor in tensors]
        placed = _with_tensors(arguments, iter(static))
        try:
            replay, output = self._record(lambda: self.forward(placed))
        except (PlanError, RequestError, torch.OutOfMemoryError):
            raise
        except RuntimeError as error:
            raise RequestError(
                "recording the model's forward as a CUDA graph was asked",
                limit=f"This model's forward cannot be recorded ({error})",
                way_out="Choose an acceleration without CUDA graphs",
            ) from error
        return _Recording(static, replay, output)


class _CudaRecorder:
    """Records CUDA graphs in one pool of memory: one of them runs at a time, and its output is used first."""

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, call: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        # Other threads (the watchdog of NCCL) may go on asking CUDA for the state of their own events.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output = call()
        return graph.replay, output


def _describe(value: Any, tensors: list[torch.Tensor]) -> Hashable:
    """Return what a recording depends on; tensors, which it does not, are collected in order."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return (tuple(value.shape), tuple(value.stride()), value.dtype, value.device)
    if isinstance(value, dict):
        return tuple((key, _describe(item, tensors)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return (type(value), *(_describe(item, tensors) for item in value))
    return (type(value), value)


def _with_tensors(value: Any, tensors: Any) -> Any:
    """Return ``value`` with the next of ``tensors`` in place of each tensor; inverse of ``_describe``."""
    if isinstance(value, torch.Tensor):
        return next(tensors)
    if isinstance(value, dict):
        return {key: _with_tensors(item, tensors) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_with_tensors(item, tensors) for item in value)
    return value
