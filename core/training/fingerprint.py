"""Short texts that stand for data and models, to tell whether a training goes on with the same ones."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_PROBES = 64


def fingerprint(value: Any) -> str:
    """Return a digest of a nested value: tensors by their bytes, containers by their contents.

    Objects of other kinds count by their class alone, so that an address in memory never takes part.
    """
    digest = hashlib.blake2b(digest_size=16)
    _feed(digest, value)
    return digest.hexdigest()


def fingerprint_model(model: nn.Module) -> str:
    """Return a digest of a model's weights: every name, shape and dtype, and some values of each tensor.

    Reading all of a large model takes as long as loading it; evenly spaced values tell two checkpoints,
    or one with and without a LoRA merged in, apart just as well.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(model.state_dict(keep_vars=True).items()):
        if not isinstance(tensor, Tensor):
            continue
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype};".encode())
        for part in plain_parts(tensor.detach()):
            digest.update(_bytes(_probe(part)))
    return digest.hexdigest()


def plain_parts(tensor: Tensor) -> list[Tensor]:
    """Return the tensors inside a wrapper subclass (a quantized weight's values and scales), or itself."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()  # pyright: ignore[reportAttributeAccessIssue]
    return [part for name in names for part in plain_parts(getattr(tensor, name))]


def _probe(tensor: Tensor) -> Tensor:
    if tensor.numel() == 0:
        return tensor.reshape(-1)
    count = min(_PROBES, tensor.numel())
    last = tensor.numel() - 1
    picked = [index * last // max(1, count - 1) for index in range(count)]
    flat = tensor.reshape(-1) if tensor.is_contiguous() else tensor.contiguous().reshape(-1)
    # Bytes first: indexing is not there for every 8-bit dtype.
    rows = flat.view(torch.uint8).reshape(tensor.numel(), -1)
    return rows[torch.tensor(picked, device=rows.device)]


def _bytes(tensor: Tensor) -> bytes:
    host = tensor.detach().to("cpu").contiguous()
    return host.reshape(-1).view(torch.uint8).numpy().tobytes() if host.numel() else b""


def _feed(digest: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        digest.update(f"tensor {tuple(value.shape)} {value.dtype};".encode())
        for part in plain_parts(value):
            digest.update(_bytes(part))
    elif isinstance(value, Mapping):
        digest.update(f"mapping {len(value)};".encode())
        for key in sorted(value, key=str):
            digest.update(f"{key!s}=".encode())
            _feed(digest, value[key])
    elif isinstance(value, list | tuple):
        digest.update(f"list {len(value)};".encode())
        for item in value:
            _feed(digest, item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        digest.update(f"{type(value).__name__};".encode())
        _feed(digest, fields)
    elif value is None or isinstance(value, bool | int | float | str):
        digest.update(f"{type(value).__name__} {value!r};".encode())
    else:
        digest.update(f"object {type(value).__name__};".encode())
