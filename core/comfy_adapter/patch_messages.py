"""ComfyUI weight patches (LoRA and its kin) as plain messages, and back.

A patch travels as names, numbers and tensors, never as a pickled object; what has no such form
(a closure, a merge with another model) is refused by name before anything is sent.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import comfy.weight_adapter
import torch

from ..errors import RequestError

PREFIX = "diffusion_model."


def encode_patches(
    patches: Mapping[str, Sequence[tuple]], *, prefix: str = PREFIX
) -> dict[str, list[dict[str, Any]]]:
    """Return ``ModelPatcher.patches`` as a message: parameter name -> list of patches.

    Args:
        patches: The patches.
        prefix: How names begin of weights that workers hold; the message names them without it.

    Raises:
        RequestError: If a patch is of another weight or has no plain form.
    """
    message = {}
    for key, entries in patches.items():
        if not key.startswith(prefix):
            raise RequestError(
                f"a weight patch of {key!r} was asked",
                limit=f"Workers hold {prefix.removesuffix('.')} only",
                way_out="Remove the node that patches it before the parallel node",
            )
        message[key.removeprefix(prefix)] = [_encode_entry(key, entry) for entry in entries]
    return message


def decode_patches(message: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, list[tuple]]:
    """Return the patches that ``encode_patches`` was given, without their prefix."""
    return {name: [_decode_entry(entry) for entry in entries] for name, entries in message.items()}


def _encode_entry(key: str, entry: tuple) -> dict[str, Any]:
    strength, value, strength_model, offset, function = entry
    return {
        "strength": float(strength),
        "value": _encode_value(key, value),
        "strength_model": float(strength_model),
        "offset": offset,
        "function": None if function is None else _function_name(key, function),
    }


def _decode_entry(entry: Mapping[str, Any]) -> tuple:
    function = None if entry["function"] is None else _find_function(*entry["function"])
    return (
        entry["strength"],
        _decode_value(entry["value"]),
        entry["strength_model"],
        entry["offset"],
        function,
    )


def _encode_value(key: str, value: Any) -> dict[str, Any]:
    if isinstance(value, comfy.weight_adapter.WeightAdapterBase):
        return {
            "adapter": type(value).__name__,
            "weights": _plain(key, value.weights),
            "loaded_keys": sorted(value.loaded_keys),
        }
    if isinstance(value, tuple):
        return {"patch": _plain(key, value)}
    raise _no_plain_form(key, value)


def _decode_value(message: Mapping[str, Any]) -> Any:
    if "adapter" not in message:
        return message["patch"]
    classes = {adapter.__name__: adapter for adapter in comfy.weight_adapter.adapters}
    return classes[message["adapter"]](set(message["loaded_keys"]), message["weights"])


def _plain(key: str, value: Any) -> Any:
    """Return nested tuples and lists of numbers, text and tensors as they are, tensors on the CPU."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple | list):
        return type(value)(_plain(key, item) for item in value)
    if isinstance(value, torch.Tensor) and type(value) in (torch.Tensor, torch.nn.Parameter):
        return value.detach().cpu()
    if isinstance(value, dict):
        return {name: _plain(key, item) for name, item in value.items()}
    raise _no_plain_form(key, value)


def _function_name(key: str, function: Callable) -> tuple[str, str]:
    name = (function.__module__, function.__qualname__)
    if not name[0].startswith("comfy.") or "<" in name[1]:
        raise _no_plain_form(key, function)
    return name


def _find_function(module: str, name: str) -> Callable:
    if not module.startswith("comfy."):
        raise ValueError(f"{module}.{name} is no function of ComfyUI")
    return getattr(importlib.import_module(module), name)


def _no_plain_form(key: str, value: Any) -> RequestError:
    return RequestError(
        f"the weight patch of {key!r} holds a {type(value).__name__}",
        limit="Only LoRA-type adapters and plain tensors can be sent to the workers",
        way_out="Merged models: save the merge as a file and load that; other patches: remove the node",
    )
