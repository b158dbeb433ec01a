"""What modulation layers returned, by the exact input; bounded.

What this module does not do: it calls no layer and knows no hook.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections import OrderedDict, deque
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .modulation_layers import CachedLayer

# Modulation by token (video models) has large inputs; hashing and keeping those would not pay.
_LARGEST_INPUT_BYTES = 2**20
_NUM_RECENT = 4


@dataclass(frozen=True)
class InputKey:
    """Everything that a frozen layer's output depends on, besides its weights.

    Attributes:
        content: The input's bytes.
        shape: Its shape.
        dtype: Its dtype.
        device: Where it is.
        autocast_dtype: What autocast computes in there; None if it is off.
    """

    content: bytes
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    autocast_dtype: torch.dtype | None

    def autocast(self) -> AbstractContextManager[Any]:
        """Return a context with the same autocast."""
        device = self.device.type
        if self.autocast_dtype is None:
            return torch.autocast(device, enabled=False) if _autocasts(device) else contextlib.nullcontext()
        return torch.autocast(device, dtype=self.autocast_dtype)


class InputKeys:
    """Makes keys.

    Args:
        trusts_versions: Read a tensor's bytes once for all layers that are given the same tensor; for
            devices, where reading has to wait for the queue. A tensor is the same one if it has the memory
            and the version of a recent one, which is kept alive so that its memory cannot become another's.

    Attributes:
        trusts_objects: The same for inference tensors, which have no version: the same object is the same
            tensor. ``clear`` ends that for the objects seen so far.
    """

    def __init__(self, *, trusts_versions: bool) -> None:
        self._trusts_versions = trusts_versions
        self.trusts_objects = False
        self._recent: deque[tuple[Tensor, int, InputKey]] = deque(maxlen=_NUM_RECENT)
        self._objects: deque[tuple[Tensor, InputKey]] = deque(maxlen=_NUM_RECENT)

    def key(self, tensor: Tensor) -> InputKey | None:
        """Return the key, or None if the input is too large to be one."""
        if tensor.numel() * tensor.dtype.itemsize > _LARGEST_INPUT_BYTES:
            return None
        has_version = self._trusts_versions and not tensor.is_inference()
        autocast_dtype = _autocast_dtype(tensor.device.type)
        if has_version:
            for seen, version, key in self._recent:
                if _is_same(seen, tensor, version) and key.autocast_dtype == autocast_dtype:
                    return key
        is_trusted = self.trusts_objects and tensor.is_inference()
        if is_trusted:
            for seen, key in self._objects:
                if seen is tensor and key.autocast_dtype == autocast_dtype:
                    return key
        key = InputKey(
            content=_read_bytes(tensor),
            shape=tuple(tensor.shape),
            dtype=tensor.dtype,
            device=tensor.device,
            autocast_dtype=autocast_dtype,
        )
        if has_version:
            self._recent.append((tensor.detach(), tensor._version, key))
        if is_trusted:
            self._objects.append((tensor, key))
        return key

    def clear(self) -> None:
        """Forget the recent tensors."""
        self._recent.clear()
        self._objects.clear()


@dataclass(eq=False)
class _Outputs:
    """What the layers returned for one input."""

    by_layer: dict[int, tuple[Tensor, Any]] = field(default_factory=dict)
    nbytes: int = 0
    awaited_bytes: int = 0
    is_waiting: bool = False


class OutputStore:
    """Outputs by input. Room is made by forgetting inputs that had their use, oldest use first.

    Args:
        limit_bytes: The most that all outputs may take.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.stored_bytes = 0
        self._entries: OrderedDict[InputKey, _Outputs] = OrderedDict()

    @property
    def room_bytes(self) -> int:
        """Bytes that outputs may take beside those that wait for their use."""
        entries = self._entries.values()
        waiting = sum(max(entry.nbytes, entry.awaited_bytes) for entry in entries if entry.is_waiting)
        return self.limit_bytes - waiting

    def find(self, key: InputKey, layer: CachedLayer) -> Tensor | None:
        """Return the layer's output for the input, unless its weights have changed since."""
        entry = self._entries.get(key)
        found = None if entry is None else entry.by_layer.get(id(layer))
        if entry is None or found is None:
            return None
        output, state = found
        if state == layer.weights_state():
            return output
        self._forget(entry, layer)
        return None

    def put(self, key: InputKey, layer: CachedLayer, output: Tensor) -> None:
        """Keep a copy of an output, if there is or can be made room for it."""
        state = layer.weights_state()
        nbytes = output.numel() * output.dtype.itemsize
        if state is None or not self._make_room(nbytes, key):
            return
        entry = self._entries.setdefault(key, _Outputs())
        self._forget(entry, layer)
        entry.by_layer[id(layer)] = (_plain_clone(output), state)
        entry.nbytes += nbytes
        self.stored_bytes += nbytes

    def await_use(self, key: InputKey, awaited_bytes: int = 0) -> None:
        """Note that the outputs were computed ahead, or will be: they are the last to be forgotten.

        Args:
            key: The input.
            awaited_bytes: Room to keep for its outputs; 0: no more than those take that are there.
        """
        entry = self._entries.setdefault(key, _Outputs()) if awaited_bytes else self._entries.get(key)
        if entry is not None:
            entry.is_waiting, entry.awaited_bytes = True, awaited_bytes

    def is_waiting(self, key: InputKey) -> bool:
        """Return whether outputs for this input were computed ahead and not used yet."""
        entry = self._entries.get(key)
        return entry is not None and entry.is_waiting

    def is_known(self, key: InputKey) -> bool:
        """Return whether there are outputs for this input."""
        return key in self._entries

    def release_waiting(self) -> None:
        """Let outputs that wait for their use be forgotten like others."""
        for key, entry in list(self._entries.items()):
            entry.is_waiting = False
            if not entry.by_layer:
                del self._entries[key]

    def note_use(self, key: InputKey) -> None:
        """Note that an output of this input was used."""
        entry = self._entries.get(key)
        if entry is not None:
            entry.is_waiting = False
            self._entries.move_to_end(key)

    def clear(self) -> None:
        """Forget everything."""
        self._entries.clear()
        self.stored_bytes = 0

    def _make_room(self, nbytes: int, key: InputKey) -> bool:
        if self.stored_bytes + nbytes <= self.limit_bytes:
            return True
        evictable = [other for other, entry in self._entries.items() if other != key and not entry.is_waiting]
        for other in evictable:
            if self.stored_bytes + nbytes <= self.limit_bytes:
                break
            self.stored_bytes -= self._entries.pop(other).nbytes
        return self.stored_bytes + nbytes <= self.limit_bytes

    def _forget(self, entry: _Outputs, layer: CachedLayer) -> None:
        found = entry.by_layer.pop(id(layer), None)
        if found is not None:
            nbytes = found[0].numel() * found[0].dtype.itemsize
            entry.nbytes -= nbytes
            self.stored_bytes -= nbytes


def _plain_clone(tensor: Tensor) -> Tensor:
    """Return a copy that is no inference tensor; modes are left only if they are on: copies are many."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            return _plain_clone(tensor)
    if torch.is_grad_enabled():
        with torch.no_grad():
            return tensor.clone()
    return tensor.clone()


def _is_same(seen: Tensor, tensor: Tensor, version: int) -> bool:
    return (
        seen.data_ptr() == tensor.data_ptr()
        and tensor._version == version == seen._version
        and seen.dtype == tensor.dtype
        and seen.shape == tensor.shape
        and seen.stride() == tensor.stride()
        and seen.device == tensor.device
    )


def _read_bytes(tensor: Tensor) -> bytes:
    with torch.no_grad():
        host = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    nbytes = host.numel() * host.dtype.itemsize
    return ctypes.string_at(host.data_ptr(), nbytes) if nbytes else b""


def _autocasts(device_type: str) -> bool:
    return torch.is_autocast_enabled(device_type)


def _autocast_dtype(device_type: str) -> torch.dtype | None:
    return torch.get_autocast_dtype(device_type) if _autocasts(device_type) else None
