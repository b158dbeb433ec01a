"""A folder of small safetensors files named by what they were made from.

A file is there whole or not at all, holds a checksum of its content and the key it was written for,
and is never changed. One that is broken is found when it is read, and can be made again.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from ...errors import SaveError
from .content_digest import content_digest

_FORMAT = "comfyui_ferry.training_cache"
_VERSION = "1"


class BrokenCacheError(Exception):
    """A cache file is missing, cut off, changed, or of another format; the text says which."""


@dataclass(frozen=True)
class CacheEntry:
    """What a file holds.

    Attributes:
        tensors: On the host.
        values: Plain values.
    """

    tensors: dict[str, Tensor]
    values: dict[str, Any]


def cache_key(*parts: Any) -> str:
    """Return the key of what is made from ``parts``, and from them alone."""
    return content_digest([_FORMAT, _VERSION, *parts])


@dataclass(frozen=True)
class CacheFolder:
    """The folder; it need not exist yet."""

    folder: Path

    def path(self, key: str) -> Path:
        """Return where the file of ``key`` is or would be."""
        return self.folder / key[:2] / f"{key}.safetensors"

    def read(self, key: str) -> CacheEntry:
        """Return the content of a file, checked.

        Raises:
            BrokenCacheError: If there is no such file or it is not what was written.
        """
        path = self.path(key)
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                # Copies: the file is mapped, and what was checked must not change with it.
                tensors = {name: file.get_tensor(name).clone() for name in file.keys()}
            values = json.loads(metadata.get("values", "null"))
        except (OSError, SafetensorError, ValueError) as error:
            raise BrokenCacheError(f"{path} cannot be read ({error})") from error
        if metadata.get("checksum") != _checksum(key, tensors, values):
            raise BrokenCacheError(f"{path} is damaged: its checksum does not match")
        return CacheEntry(tensors, values)

    def shape(self, key: str, name: str) -> tuple[int, ...]:
        """Return the shape of the tensor ``name``, without reading it.

        Raises:
            BrokenCacheError: If the file or the tensor is not there.
        """
        try:
            with safe_open(self.path(key), framework="pt") as file:
                return tuple(file.get_slice(name).get_shape())
        except (OSError, SafetensorError) as error:
            raise BrokenCacheError(f"{self.path(key)} cannot be read ({error})") from error

    def has(self, key: str) -> bool:
        """Return whether a file is there and intact; reads all of it."""
        if not self.path(key).exists():
            return False
        try:
            self.read(key)
        except BrokenCacheError:
            return False
        return True

    def write(self, key: str, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Write a file, replacing a broken one.

        Raises:
            SaveError: If the disk does not take it; nothing is left then.
        """
        # A view of a larger tensor would be refused, and a shared one stored twice.
        kept = {name: tensor.detach().to("cpu").contiguous().clone() for name, tensor in tensors.items()}
        plain = json.loads(json.dumps(dict(values)))
        metadata = {"checksum": _checksum(key, kept, plain), "values": json.dumps(plain)}
        try:
            _write_whole(self.path(key), save(kept, metadata))
        except OSError as error:
            raise SaveError(
                f"the training cache in {self.folder} could not be written ({error}). Free the disk, or mend "
                "the folder, and run again: what was encoded before is found there."
            ) from error


def _write_whole(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, partial = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".partial")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise


def _checksum(key: str, tensors: Mapping[str, Tensor], values: Any) -> str:
    return content_digest([_FORMAT, _VERSION, key, dict(tensors), values])
