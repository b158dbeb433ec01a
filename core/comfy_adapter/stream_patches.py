"""ComfyUI's weight patches (LoRA and its kin, weight hooks) as changes of streamed weights.

A patched weight is what ``ModelPatcher.patch_weight_to_device`` would have made of it: the same
arithmetic on the same device, the same rounding, the same seed. Hooked patches come on top of the
rounded result, as ``patch_hook_weight_to_device`` puts them there.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import comfy.float
import comfy.lora
import comfy.model_management
import comfy.model_patcher
import comfy.utils
import comfy.weight_adapter
import torch

from ..offload import PackedWeight, WeightChange

Patches = Mapping[str, Sequence[tuple]]


class _Same:
    """Compares by identity, and keeps the object alive so that its identity stays its own."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other._value is self._value

    def __hash__(self) -> int:
        return id(self._value)


class PatchValues:
    """Copies of patch values (LoRA factors) on the device that computes, each made once.

    Attributes:
        nbytes: What they take there.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._moved: dict[int, tuple[Any, Any, int]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all copies; 0 where the device is the host's own memory."""
        return sum(nbytes for _, _, nbytes in self._moved.values())

    def keep(self, patches: Sequence[Patches], limit_bytes: int) -> None:
        """Have copies of all values of ``patches``, or of none if they take more than the limit."""
        values = {
            id(entry[1]): entry[1] for table in patches for entries in table.values() for entry in entries
        }
        self._moved = {key: moved for key, moved in self._moved.items() if key in values}
        if self._device.type == "cpu":
            return
        wanted = sum(_value_bytes(value) for value in values.values())
        if wanted > limit_bytes:
            self._moved = {}
            return
        for key, value in values.items():
            if key not in self._moved:
                self._moved[key] = (value, self._move(value), _value_bytes(value))

    def find(self, value: Any) -> Any:
        """Return the copy of a value, or the value."""
        return self._moved[id(value)][1] if id(value) in self._moved else value

    def _move(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to(self._device)
        if isinstance(value, comfy.weight_adapter.WeightAdapterBase):
            moved = copy.copy(value)
            moved.weights = self._move(value.weights)
            return moved
        if type(value) is tuple:
            return tuple(self._move(item) for item in value)
        return value


def _value_bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.dtype.itemsize
    if isinstance(value, comfy.weight_adapter.WeightAdapterBase):
        return _value_bytes(value.weights)
    if type(value) is tuple:
        return sum(_value_bytes(item) for item in value)
    return 0


def weight_changes(
    model: Any,
    patches: Patches,
    hook_patches: Patches,
    *,
    values: PatchValues,
    master: Callable[[str], torch.Tensor | None],
) -> dict[str, WeightChange]:
    """Return the change of every patched weight.

    Args:
        model: The ``BaseModel`` in which the weights stand while they are changed.
        patches: ``ModelPatcher.patches``.
        hook_patches: The combined patches of the active weight hooks.
        values: Copies of the patch values.
        master: Returns a weight's unpatched object by its key, None if there is none.
    """
    changes = {}
    for key in [*patches, *(key for key in hook_patches if key not in patches)]:
        if master(key) is None:
            continue
        stages = (tuple(patches.get(key, ())), tuple(hook_patches.get(key, ())))
        changes[key] = WeightChange(
            key=tuple(tuple(_entry_key(entry) for entry in stage) for stage in stages),
            apply=_change(model, key, stages, values=values, master=master),
        )
    return changes


def _entry_key(entry: tuple) -> tuple:
    strength, value, strength_model, offset, function = entry
    return (float(strength), _Same(value), float(strength_model), repr(offset), _Same(function))


def _change(
    model: Any,
    key: str,
    stages: tuple[tuple, tuple],
    *,
    values: PatchValues,
    master: Callable[[str], torch.Tensor | None],
) -> Callable[[torch.Tensor], torch.Tensor]:
    def apply(weight: torch.Tensor) -> torch.Tensor:
        if isinstance(weight, PackedWeight):  # it stays packed; its products are with the patched weight
            return weight.changed(apply)
        _, set_function, convert_function = comfy.model_patcher.get_key_weight(model, key)
        for stage, dtype in zip(stages, (_compute_dtype(weight.device), torch.float32), strict=True):
            if not stage:
                continue
            floats: Any = comfy.model_management.cast_to_device(weight, weight.device, dtype, copy=True)
            if convert_function is not None:
                floats = convert_function(floats, inplace=True)
            entries = [(entry[0], values.find(entry[1]), *entry[2:]) for entry in stage]
            floats = comfy.lora.calculate_weight(
                entries, floats, key, original_weights={key: [(master(key), None)]}
            )
            weight = _store(weight, floats, key, set_function)
        return weight

    return apply


def _store(weight: torch.Tensor, floats: torch.Tensor, key: str, set_function: Any) -> torch.Tensor:
    """Return the floats in the weight's own format, rounded as ComfyUI does."""
    seed = _seed(key)
    if set_function is None:
        return comfy.float.stochastic_rounding(floats, weight.dtype, seed=seed)
    stored = set_function(floats, inplace_update=False, seed=seed, return_weight=True)
    is_parameter = isinstance(weight, torch.nn.Parameter)
    with torch.inference_mode(False):
        return torch.nn.Parameter(stored.clone(), requires_grad=False) if is_parameter else stored


def _compute_dtype(device: torch.device) -> torch.dtype:
    """Return what ComfyUI computes LoRA in: newer versions choose it by the device."""
    choose = getattr(comfy.model_management, "lora_compute_dtype", None)
    return torch.float32 if choose is None else choose(device)


def _seed(key: str) -> int:
    home = comfy.utils if hasattr(comfy.utils, "string_to_seed") else comfy.model_patcher
    return home.string_to_seed(key)
