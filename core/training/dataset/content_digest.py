"""SHA-256 of values by their content: two values of one digest are the same to a computation.

What it does not know (an object that could hold anything) it refuses, so that no change goes unseen.
"""

from __future__ import annotations

import hashlib
import numbers
import os
import types
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_MAX_THREADS = 4


def content_digest(value: Any) -> str:
    """Return the hexadecimal SHA-256 of ``value``: tensors, containers, plain values and functions.

    Raises:
        TypeError: Naming the kind of an object whose content cannot be told.
    """
    digest = hashlib.sha256()
    _feed(digest, value)
    return digest.hexdigest()


def tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    """Return the digest of many large tensors by name, computed on several threads.

    Every byte counts: a change of one weight out of billions gives another digest. About 1 GB a
    second for each core.
    """
    with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as pool:
        digests = pool.map(content_digest, tensors.values())
        return content_digest(sorted(zip(tensors, digests, strict=True)))


def _feed(digest: Any, value: Any) -> None:
    """Add a value with its kind and length, so that no two values run into each other."""
    if isinstance(value, numpy.generic):
        value = value.item()
    if isinstance(value, Tensor):
        _feed_tensor(digest, value)
    elif value is None or isinstance(value, bool | str | bytes | numbers.Number):
        _mark(digest, type(value).__name__, value if isinstance(value, bytes) else repr(value).encode())
    elif isinstance(value, Mapping | list | tuple | set | frozenset):
        _feed_container(digest, value)
    elif isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        code = value.__code__
        constants = [item for item in code.co_consts if not isinstance(item, types.CodeType)]
        _feed(digest, ["function", code.co_code, code.co_names, constants, value.__defaults__, cells])
    elif isinstance(value, torch.dtype | torch.device | type):
        _mark(digest, "name", str(value).encode())
    else:
        raise TypeError(f"{type(value).__module__}.{type(value).__qualname__}")


def _feed_container(digest: Any, value: Any) -> None:
    if isinstance(value, Mapping):
        items = sorted(value.items(), key=lambda pair: repr(pair[0]))
        kind, value = "mapping", [part for pair in items for part in pair]
    elif isinstance(value, list | tuple):
        kind = "list"
    else:
        kind, value = "set", sorted(content_digest(item) for item in value)
    _mark(digest, kind, str(len(value)).encode())
    for item in value:
        _feed(digest, item)


def _feed_tensor(digest: Any, tensor: Tensor) -> None:
    if is_traceable_wrapper_subclass(tensor):
        names, context = tensor.__tensor_flatten__()  # pyright: ignore[reportAttributeAccessIssue]
        _mark(digest, type(tensor).__qualname__, repr(context).encode())
        for name in names:
            _feed_tensor(digest, getattr(tensor, name))
        return
    _mark(digest, f"{tensor.dtype}", repr(tuple(tensor.shape)).encode())
    plain = tensor.detach().to("cpu").contiguous().reshape(-1)
    if plain.numel():
        digest.update(plain.view(torch.uint8).numpy().data)


def _mark(digest: Any, kind: str, content: bytes) -> None:
    digest.update(f"{kind}:{len(content)}:".encode())
    digest.update(content)
