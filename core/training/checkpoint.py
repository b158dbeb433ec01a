"""Write a LoRA file so that it is there whole or not at all, and prove that it reads back.

A file is written under a temporary name in the target folder, flushed to the disk, and renamed.
After the rename it is read again and handed to the caller's check; a file that fails is removed.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import safetensors
import safetensors.torch
from torch import Tensor

from ..errors import SaveError

_CANNOT_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)


def save_verified(
    path: Path,
    tensors: Mapping[str, Tensor],
    *,
    metadata: Mapping[str, str],
    verify: Callable[[Path], None],
) -> None:
    """Write ``tensors`` to ``path`` atomically and keep the file only if ``verify(path)`` accepts it.

    Args:
        path: A new file; its folder exists.
        tensors: Contiguous host tensors.
        metadata: Strings for the file's header.
        verify: Raises if the file at this path is not what was meant.

    Raises:
        SaveError: If the file exists already, could not be written, or was refused; it is gone then. Also if
            the disk does not confirm its name; it is there then, whole and accepted, and the message says so.
    """
    if path.exists():
        raise SaveError(f"{path} exists already and is not overwritten. Choose another prefix.")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    unconfirmed: OSError | None = None
    try:
        _write(temporary, safetensors.torch.save(dict(tensors), dict(metadata)))
        os.replace(temporary, path)
    except OSError as error:
        raise SaveError(
            f"{path} could not be written ({error}). Free the disk or choose another prefix."
        ) from error
    finally:
        temporary.unlink(missing_ok=True)
    try:
        sync_folder(path.parent)
    except OSError as error:
        unconfirmed = error
    try:
        _verify(path, verify)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    if unconfirmed is not None:
        raise SaveError(
            f"{path} is written and reads back, but the disk does not confirm it ({unconfirmed}): it may be "
            "gone after a power loss. Copy it to another disk."
        ) from unconfirmed


def _verify(path: Path, verify: Callable[[Path], None]) -> None:
    try:
        verify(path)
    except (OSError, safetensors.SafetensorError) as error:
        raise SaveError(f"{path} does not read back ({error}). Save it again.") from error


def read_lora(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file.

    Raises:
        SaveError: If it is not a whole safetensors file.
    """
    try:
        return safetensors.torch.load_file(path)
    except (OSError, safetensors.SafetensorError) as error:
        raise SaveError(f"{path} does not read back ({error}). Save it again.") from error


def _write(path: Path, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk: a file that was renamed is only there once they are.

    Where that cannot be asked for (Windows, some network and FUSE file systems), nothing is done.

    Raises:
        OSError: If the disk fails.
    """
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC:
            raise
    finally:
        os.close(descriptor)
