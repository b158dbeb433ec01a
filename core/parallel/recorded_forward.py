"""Record a model's forward as a CUDA graph and replay it: the host then issues one launch a step.

A forward of many small kernels is limited by the host that launches them, the more so the more GPUs
share the work. A recording holds for one shape of the inputs and one set of weights in memory: the
first call of a shape runs as it is, the second is recorded, later ones replay it. Collectives are
recorded with the rest. The kernels, hence the results, are those of the forward as it is, and each
recording proves it once: it is replayed twice beside the forward itself. Ranks that share a forward record
it together or not at all, because they must make the same exchanges.

What this module does not do: it never looks inside the forward. One that depends on the values of its
tensors on the host cannot be recorded, and is refused.

Source: CUDA graphs, https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs.
"""

from __future__ import annotations

import functools
import gc
import math
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch

from ..cuda_capture import CudaCapture
from ..errors import PlanError, RequestError
from ..log import get_logger

Arguments = dict[str, Any]
Recorder = Callable[[Callable[[], Any]], tuple[Callable[[], None], Any]]

_log = get_logger("parallel")

# A positive and a negative prompt of other lengths are two shapes; so many prompts may alternate.
_MAX_RECORDINGS = 4
# Shapes that were seen once, of which nothing is kept but the name.
_MAX_SEEN = 64
# Relative norm of the error: the same kernels on the same inputs, but some add in another order each time.
_TOLERANCE = 1e-2


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
        name: Whose forward it is, for messages.
        required: Whether a forward that cannot be recorded is refused; else it runs as it is.
        agree: Returns whether all ranks of its groups say yes; called by all of them. None: there is one.
    """

    def __init__(
        self,
        forward: Callable[[Arguments], Any],
        *,
        record: Recorder | None = None,
        name: str = "this model",
        required: bool = True,
        agree: Callable[[bool], bool] | None = None,
    ) -> None:
        self.forward = forward
        self.name = name
        self._alone = agree is None
        self._agree: Callable[[bool], bool] = bool if agree is None else agree
        self.required = required
        self._possible = True
        self._record = _CudaRecorder() if record is None else record
        self._recordings: OrderedDict[Hashable, _Recording] = OrderedDict()
        self._seen: OrderedDict[Hashable, None] = OrderedDict()

    def __call__(self, arguments: Arguments) -> Any:
        """Return the forward's output for ``arguments``; valid until the next call.

        Raises:
            RequestError: If the forward cannot be recorded, and must be.
        """
        if not self._possible:
            return self.forward(arguments)
        tensors: list[torch.Tensor] = []
        key = _describe(arguments, tensors)
        if key in self._recordings:
            self._recordings.move_to_end(key)
            recording = self._recordings[key]
            for static, tensor in zip(recording.inputs, tensors, strict=True):
                static.copy_(tensor)
        elif key in self._seen:
            recorded = self._try_to_record(arguments, tensors)
            if recorded is None:
                return self.forward(arguments)
            recording = self._recordings[key] = recorded
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

    def _try_to_record(self, arguments: Arguments, tensors: list[torch.Tensor]) -> _Recording | None:
        recorded = self._attempt(lambda: self._begin(arguments, tensors))
        if recorded is None:
            return None
        static, call, replay, output = recorded
        # A rank that fails amid its exchanges is lost to the others, whatever it says then.
        expected = None if self._alone else call()
        same = self._attempt(lambda: _check(replay, output, call() if self._alone else expected))
        return _Recording(static, replay, output) if same else None

    def _attempt(self, action: Callable[[], Any]) -> Any:
        """Return what ``action`` does here if it succeeds on all ranks; None if it need not, and does not.

        Raises:
            RequestError: If it must succeed and does not.
        """
        try:
            return self._together(action)
        except (PlanError, RequestError):
            raise
        except RuntimeError as error:
            if not self.required:
                _log.info("the forward of %s is not recorded as a CUDA graph: %s", self.name, error)
                self.clear()
                self._possible = False
                return None
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise RequestError(
                "recording the model's forward as a CUDA graph was asked",
                limit=f"The forward of {self.name} cannot be recorded ({error})",
                way_out="Choose an acceleration without CUDA graphs",
            ) from error

    def _begin(self, arguments: Arguments, tensors: list[torch.Tensor]) -> tuple:
        static = [tensor.clone() for tensor in tensors]
        call = functools.partial(self.forward, _with_tensors(arguments, iter(static)))
        return static, call, *self._record(call)

    def _together(self, action: Callable[[], Any]) -> Any:
        """Return what ``action`` does here if it succeeds on all ranks.

        Raises:
            RuntimeError: If it fails, here or elsewhere: what a GPU has free is its own matter.
        """
        try:
            result = action()
        except (PlanError, RequestError):
            raise
        except RuntimeError:
            self._agree(False)
            raise
        if not self._agree(True):
            raise RuntimeError("another GPU that shares the forward cannot record it")
        return result


def _check(replay: Callable[[], None], output: Any, expected: Any) -> bool:
    """Compare two replays with what the forward gives; all ranks replay, whatever one of them finds.

    Returns:
        True.

    Raises:
        RuntimeError: If they differ, or there is no memory to tell.
    """
    recorded: list[torch.Tensor] = []
    plain: list[torch.Tensor] = []
    _describe(output, recorded)
    _describe(expected, plain)
    errors: list[float] = []
    full: torch.OutOfMemoryError | None = None
    for _ in range(2):
        replay()
        try:
            errors += [_relative_error(one, other) for one, other in zip(recorded, plain, strict=True)]
        except torch.OutOfMemoryError as error:
            full = error
    if full is not None:
        raise full
    # Not finite: the forward itself gave that.
    if any(math.isfinite(error) and error > _TOLERANCE for error in errors):
        raise RuntimeError(f"its replay differs from the forward itself by {max(errors):.1e}")
    return True


def _relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    size = expected.double().norm()
    error = (actual.double() - expected.double()).norm()
    return float(error / size) if size else float(error)


class _CudaRecorder:
    """Records CUDA graphs in one pool of memory: one of them runs at a time, and its output is used first."""

    def __init__(self) -> None:
        self._capture = CudaCapture()

    def __call__(self, call: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        gc.collect()  # what forwards of other shapes left; nothing can be given back while recording
        torch.cuda.synchronize()
        _check_room(2)  # for the recording, and for forwards of other shapes beside it
        recorded = self._capture(call)
        _check_room(1)
        return recorded


def _check_room(forwards: int) -> None:
    """Check that there is room for so many forwards, each as large as the largest so far.

    Raises:
        torch.OutOfMemoryError: If not.
    """
    torch.cuda.empty_cache()
    free_bytes, _ = torch.cuda.mem_get_info()
    forward_bytes = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
    if free_bytes < forwards * forward_bytes:
        raise torch.OutOfMemoryError(
            f"{free_bytes} bytes are free: beside the recording of a forward that needs "
            f"{forward_bytes} there would be too few for others"
        )


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
