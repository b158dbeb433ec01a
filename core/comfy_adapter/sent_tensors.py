"""Send a tensor that stays the same from step to step only once: prompts, reference latents, masks.

ComfyUI makes its arguments anew for every step, so objects say nothing and values are compared, on the
device where they lie. A tensor that was sent before is named by a number from then on; the worker keeps it
under that number, on its GPU. What changes in every step (the latent, ControlNet's residuals) is never kept.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

# Comparing costs a wait for the GPU, so it must save more than that.
SMALLEST_BYTES = 16 << 10
LARGEST_BYTES = 64 << 20
_KEPT_PER_PLACE = 8
# Arguments that differ in every step.
_CHANGING = frozenset({"x", "timestep", "timesteps", "control"})
_MARK = "ferry_kept"
_numbers = itertools.count()


@dataclass
class PackedArguments:
    """One call's arguments, ready to be sent.

    Attributes:
        arguments: The arguments on the CPU; a kept tensor is ``{"ferry_kept": number}``.
        fresh: Kept tensors that this call brings, by number as text.
        forget: Numbers that no call will name again.
    """

    arguments: dict[str, Any]
    fresh: dict[str, torch.Tensor] = field(default_factory=dict)
    forget: list[int] = field(default_factory=list)


class SentTensors:
    """What the ranks of one branch keep of one model. Used by one thread at a time."""

    def __init__(self) -> None:
        # By place in the arguments: number and value, the least recently used first.
        self._kept: dict[str, dict[int, torch.Tensor]] = {}
        self._missed: dict[str, int] = {}
        self._forget: list[int] = []
        self._new: list[tuple[str, int, torch.Tensor]] = []

    def pack(self, arguments: Mapping[str, Any]) -> PackedArguments:
        """Return the message for a call; call ``commit`` once it has been sent."""
        self._new = []
        packed = PackedArguments({}, forget=list(self._forget))
        done: dict[int, Any] = {}  # one tensor in two places is one tensor there, too
        for name, value in arguments.items():
            packed.arguments[name] = self._pack(value, name, name not in _CHANGING, packed, done)
        return packed

    def commit(self) -> None:
        """Note that the ranks have received the last packed call."""
        self._forget = []
        for place, number, tensor in self._new:
            kept = self._kept.setdefault(place, {})
            kept[number] = tensor
            if len(kept) > _KEPT_PER_PLACE:
                oldest = next(iter(kept))
                del kept[oldest]
                self._forget.append(oldest)
        self._new = []

    def clear(self) -> None:
        """Keep nothing any more; the ranks learn it with the next call."""
        self._forget += [number for kept in self._kept.values() for number in kept]
        self._kept.clear()
        self._missed.clear()

    def _pack(self, value: Any, place: str, keep: bool, packed: PackedArguments, done: dict[int, Any]) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) not in done:
                done[id(value)] = self._pack_tensor(value.detach(), place, keep, packed), value
            return done[id(value)][0]
        if isinstance(value, dict):
            return {
                key: self._pack(item, f"{place}.{key}", keep and key not in _CHANGING, packed, done)
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            items = enumerate(value)
            return type(value)(self._pack(item, f"{place}.{i}", keep, packed, done) for i, item in items)
        return value

    def _pack_tensor(self, tensor: torch.Tensor, place: str, keep: bool, packed: PackedArguments) -> Any:
        plain = type(tensor) is torch.Tensor and tensor.layout == torch.strided
        if not keep or not plain or not SMALLEST_BYTES <= tensor.nbytes <= LARGEST_BYTES:
            return tensor
        kept = self._kept.get(place, {})
        for number, known in reversed(kept.items()):
            same_kind = (known.shape, known.dtype, known.device) == (
                tensor.shape,
                tensor.dtype,
                tensor.device,
            )
            if same_kind and torch.equal(known, tensor):
                kept[number] = kept.pop(number)
                self._missed[place] = 0
                return {_MARK: number}
        self._missed[place] = self._missed.get(place, 0) + 1
        if self._missed[place] > _KEPT_PER_PLACE:  # it seems to change in every step
            return tensor
        number = next(_numbers)
        # A copy: whoever owns the tensor may change it in place.
        self._new.append((place, number, tensor.clone()))
        packed.fresh[str(number)] = tensor
        return {_MARK: number}


def _kind(tensor: torch.Tensor) -> tuple:
    return tensor.shape, tensor.dtype, tensor.device


def unpack(
    arguments: Any, kept: Mapping[int, torch.Tensor], move: Callable[[torch.Tensor], torch.Tensor]
) -> Any:
    """Return a call's arguments in a worker.

    Args:
        arguments: ``PackedArguments.arguments`` as received.
        kept: The tensors that this worker keeps, where it computes.
        move: Brings any other tensor there.
    """
    return _unpacked(arguments, kept, {}, move)


def _unpacked(
    value: Any,
    kept: Mapping[int, torch.Tensor],
    copies: dict[int, torch.Tensor],
    move: Callable[[torch.Tensor], torch.Tensor],
) -> Any:
    # No function inside `unpack`: one that calls itself is a cycle, and would keep the copies until Python
    # next looks for cycles.
    if isinstance(value, torch.Tensor):
        return move(value)
    if isinstance(value, dict):
        if value.keys() == {_MARK}:
            number = value[_MARK]
            if number not in copies:  # a copy: a model may write into its arguments
                copies[number] = kept[number].clone()
            return copies[number]
        return {key: _unpacked(item, kept, copies, move) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_unpacked(item, kept, copies, move) for item in value)
    return value
