"""Keep autograd from holding streamed weights.

Autograd saves a view of the weight for the backward of nearly every layer; a view of a slot would
hold the whole slot until then. During managed forwards a pair of saved-tensor hooks turns such a
view into a handle (bucket, dtype, offset, size, stride), and brings the bucket in again when
backward asks. So memory is free after a layer's forward, with checkpointing or without, and which
weights backward needs is never guessed.

PyTorch applies only the innermost pair of hooks. Every tensor that is not in a slot is therefore
passed to the pair that was innermost before ours (non-reentrant checkpoint, ``save_on_cpu``), or is
kept as it is. Autograd does not check for in-place changes where hooks are set, so kept tensors and
handles carry the version they were saved at.

Uses ``torch._C._autograd._top_saved_tensors_default_hooks``, which ``torch.utils.checkpoint``
relies on as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..errors import OffloadError
from .buckets import Bucket, Segment
from .segments import view_of_storage
from .unobserved import uncompiled
from .wrappers import Rebuild, take_apart

if TYPE_CHECKING:
    from collections.abc import Callable

    from .engine import Engine

    Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]

# The beginning of autograd's own message, for those who search for it.
_MODIFIED = "one of the variables needed for gradient computation has been modified by an inplace operation"

_autograd: Any = torch._C._autograd  # pyright: ignore[reportAttributeAccessIssue]

_REQUIRED = (
    ("torch._C._autograd", "_top_saved_tensors_default_hooks"),
    ("torch._C._autograd", "_push_saved_tensors_default_hooks"),
    ("torch._C._autograd", "_pop_saved_tensors_default_hooks"),
    ("torch._C._autograd", "_saved_tensors_hooks_is_enabled"),
    ("torch._C", "_current_graph_task_id"),
    ("torch._C", "_storage_Use_Count"),
)


def check_torch() -> None:
    """Check that this PyTorch has the internals that the engine stands on.

    Raises:
        OffloadError: If one is missing.
    """
    holders = {"torch._C": torch._C, "torch._C._autograd": _autograd}
    missing = [f"{holder}.{name}" for holder, name in _REQUIRED if not hasattr(holders[holder], name)]
    if missing:
        raise OffloadError(
            f"Offloading needs {', '.join(missing)}, which torch {torch.__version__} does not have. "
            "Use a version that this is tested with: torch 2.11 or 2.14."
        )


@dataclass(frozen=True)
class _SlotHandle:
    """A view of a bucket's bytes, without the bytes."""

    bucket: Bucket
    segment: Segment
    version: int
    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    is_conj: bool
    is_neg: bool

    def check(self) -> None:
        version = self.segment.version()
        if version != self.version:
            raise RuntimeError(
                f"{_MODIFIED}: "
                f"{self.segment.tensors[0].path}, shape {list(self.size)}, is at version {version}; expected "
                f"version {self.version} instead. It was changed between its forward and its backward (by an "
                "optimizer step, load_state_dict or an assignment); change it after the backward."
            )

    def view(self, storage: torch.UntypedStorage) -> torch.Tensor:
        view = view_of_storage(storage, self.dtype, self.offset, self.size, self.stride)
        with torch.inference_mode(False), torch.no_grad():
            view = torch._conj(view) if self.is_conj else view
            return torch._neg_view(view) if self.is_neg else view


class _KeptTensor(NamedTuple):  # made for nearly every tensor that autograd saves: the cheapest there is
    """Any other tensor, when nobody else has hooks."""

    tensor: torch.Tensor
    version: int

    def open(self) -> torch.Tensor:
        if self.tensor._version != self.version:
            raise RuntimeError(
                f"{_MODIFIED}: "
                f"[{self.tensor.type()} {list(self.tensor.size())}] is at version {self.tensor._version}; "
                f"expected version {self.version} instead. Hint: the backtrace of the forward is found with "
                "torch.autograd.set_detect_anomaly(True) and without offloading."
            )
        return self.tensor


@dataclass(frozen=True)
class _OuterValue:
    """What the pair of hooks around ours made of a tensor."""

    unpack: Callable[[Any], torch.Tensor]
    value: Any


@dataclass(frozen=True)
class _Wrapper:
    """A wrapper subclass around packed tensors."""

    rebuild: Rebuild
    parts: tuple[Any, ...]


_PLAIN = (torch.Tensor, torch.nn.Parameter)


class _HookPair:
    """The hooks of one push, with the pair that they stand in front of."""

    def __init__(self, engine: Engine, outer: Hooks | None) -> None:
        self.engine = engine
        self.outer = outer

    @uncompiled
    def pack(self, tensor: torch.Tensor) -> Any:
        if type(tensor) not in _PLAIN and is_traceable_wrapper_subclass(tensor):
            leaves, rebuild = take_apart(tensor)
            handles = [self._handle(leaf) for leaf in leaves]
            if any(handles):
                parts = [h or _keep(leaf) for h, leaf in zip(handles, leaves, strict=True)]
                return _Wrapper(rebuild, tuple(parts))
        else:
            handle = self._handle(tensor)
            if handle is not None:
                return handle
        if self.outer is not None:
            return _OuterValue(self.outer[1], self.outer[0](tensor))
        return _keep(tensor)

    @uncompiled
    def unpack(self, packed: Any) -> torch.Tensor:
        if type(packed) is _KeptTensor:
            return packed.open()
        if isinstance(packed, _SlotHandle):
            packed.check()
            view = self.engine.reopen(packed.bucket, packed.segment, packed.view)
            packed.check()  # an overlapped optimizer may have stepped it meanwhile
            return view
        if isinstance(packed, _OuterValue):
            return packed.unpack(packed.value)
        assert isinstance(packed, _Wrapper)
        return packed.rebuild([self.unpack(part) for part in packed.parts])

    def _handle(self, tensor: torch.Tensor) -> _SlotHandle | None:
        if tensor.layout != torch.strided or not torch._C._has_storage(tensor):
            return None
        # Most tensors are no weights. An empty one has no address of its own.
        if tensor.numel() and not self.engine.residency.is_in_a_slot(tensor.data_ptr()):
            return None
        slot = self.engine.residency.slot_at(tensor.untyped_storage().data_ptr())
        if slot is None or slot.bucket is None:
            return None
        if self.engine.transfer.is_recording():
            return None  # the recording reads this very memory at every replay
        bucket = slot.bucket
        offset = int(tensor.storage_offset())
        segment = bucket.segment_at(offset * tensor.dtype.itemsize)
        is_in_use = slot is bucket.slot and bucket.is_bound
        if not is_in_use and not slot.is_current(segment):
            return None  # a view of older content that somebody kept: it stays as it is
        return _SlotHandle(
            bucket=bucket,
            segment=segment,
            version=segment.version(),
            dtype=tensor.dtype,
            offset=offset,
            size=tuple(tensor.size()),
            stride=tuple(tensor.stride()),
            is_conj=tensor.is_conj(),
            is_neg=tensor.is_neg(),
        )


def _keep(tensor: torch.Tensor) -> _KeptTensor:
    # Without its history: an operation that keeps its own output would keep itself, and what came before it,
    # alive for good if no backward follows.
    kept = tensor if tensor.grad_fn is None else tensor.detach()
    return _KeptTensor(kept, tensor._version)


class SavedTensorHooks:
    """Push and pop the engine's pair around forwards."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._alone = _HookPair(engine, None)

    def push(self) -> bool:
        """Make the engine's pair the innermost one; return whether there was something to push.

        Raises:
            OffloadError: If hooks are disabled where gradients are recorded (``torch.func.grad``).
        """
        if self.is_innermost():
            return False
        outer = _autograd._top_saved_tensors_default_hooks(True)
        pair = self._alone if outer is None else _HookPair(self._engine, outer)
        _autograd._push_saved_tensors_default_hooks(pair.pack, pair.unpack)
        return True

    def is_innermost(self) -> bool:
        """Return whether there is nothing to push: ours are on top, or nothing will be saved."""
        if not _autograd._saved_tensors_hooks_is_enabled():
            if torch.is_grad_enabled():
                reason = _autograd._saved_tensors_hooks_get_disabled_error_message()
                raise OffloadError(
                    "An offloaded model was run with gradients where saved-tensor hooks are disabled: "
                    f"{reason} Without them autograd would keep weights that are on the host by the time "
                    "of the backward. Remove the OffloadTrainingManager for this, or run without gradients."
                )
            return True
        outer = _autograd._top_saved_tensors_default_hooks(True)
        top = None if outer is None else getattr(outer[0], "__self__", None)
        return isinstance(top, _HookPair) and top.engine is self._engine

    def pop(self) -> None:
        """Take back the last push."""
        _autograd._pop_saved_tensors_default_hooks()
