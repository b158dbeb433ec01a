"""What must be the same on every machine of a pool, and which address reaches a machine.

Ranks run the same collectives in the same order, so another version of the pack, of PyTorch or of the
host application may hang or compute something else without an error. Hence versions are compared exactly.
"""

from __future__ import annotations

import fcntl
import hashlib
import platform
import socket
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

_SIOCGIFADDR = 0x8915  # netdevice(7): the address of a network interface
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def fingerprint(pack: Path, files: Mapping[str, Path]) -> dict[str, str]:
    """Return what must be equal, by the name that an error message gives it.

    Args:
        pack: The pack's folder; its code counts, not where it lies.
        files: More files whose content counts, by name.
    """
    sources = sorted(path for path in (pack / "core").rglob("*.py") if path.is_file())
    found = {
        "ComfyUI-Ferry": _digest((path.relative_to(pack).as_posix(), path) for path in sources),
        "PyTorch": str(torch.__version__),
        "Python": ".".join(platform.python_version_tuple()[:2]),
    }
    return found | {name: _digest([(name, path)]) for name, path in files.items()}


def differences(mine: Mapping[str, str], theirs: Mapping[str, Any]) -> list[str]:
    """Return one sentence for each thing that is not the same, without full stops."""
    return [
        f"{name} is {theirs.get(name, 'missing')} there and {value} here"
        for name, value in mine.items()
        if theirs.get(name) != value
    ]


def boot_id() -> str:
    """Return a number that two processes share if one kernel runs both, "" if it is not known."""
    return _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""


def interface_of(address: str) -> str | None:
    """Return the name of this machine's network interface that has the IPv4 ``address``, or None."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:
                continue  # an interface without an IPv4 address
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None


def _digest(files: Iterable[tuple[str, Path]]) -> str:
    """Return a short digest of names and contents; a file that is missing counts as such."""
    total = hashlib.sha256()
    for name, path in files:
        content = path.read_bytes() if path.is_file() else b"missing"
        total.update(f"{name}\0{len(content)}\0".encode() + content)
    return total.hexdigest()[:12]
