"""How much host memory may still be taken, and which tensors would take more of it.

What this module does not do: it does not reserve anything, so another process may take it first.
Sources: proc(5) ``meminfo`` and ``maps``; the kernel's cgroup-v2 documentation, "memory.max".
"""

from __future__ import annotations

import bisect
import ctypes
import mmap
from collections.abc import Iterable
from pathlib import Path

import torch

_DONTNEED = 4  # MADV_DONTNEED


def available_host_bytes(root: Path = Path("/")) -> int:
    """Return the bytes that the machine, and each control group that this process is in, still gives.

    Args:
        root: Where ``proc`` and ``sys`` are mounted.
    """
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            machine = 1024 * int(line.split()[1])
            return min([machine, *_left_in_groups(root)])
    raise OSError("/proc/meminfo does not say MemAvailable")


def file_backed_bytes(tensors: Iterable[torch.Tensor], maps: Path = Path("/proc/self/maps")) -> int:
    """Return the bytes of CPU tensors that are still mapped from a file, as safetensors loads them.

    Such pages are the system's cache; a copy of them takes new memory.
    """
    starts, ends = [], []
    for line in maps.read_text().splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[4] != "0" and not fields[5].startswith("/memfd:"):
            start, end = (int(part, 16) for part in fields[0].split("-"))
            starts.append(start)
            ends.append(end)
    total, seen = 0, set()
    for tensor in tensors:
        address = tensor.data_ptr() if tensor.device.type == "cpu" else 0
        position = bisect.bisect_right(starts, address) - 1
        if address and address not in seen and position >= 0 and address < ends[position]:
            total += tensor.nbytes
            seen.add(address)
    return total


class UnchangedFilePages:
    """Mappings of files in this process that it has not written to, as safetensors makes them.

    Args:
        smaps: What the kernel says of each mapping, see proc(5).
    """

    def __init__(self, smaps: Path = Path("/proc/self/smaps")) -> None:
        self._ranges: list[tuple[int, int]] = []
        current: tuple[int, int] | None = None
        for line in smaps.read_text().splitlines():
            fields = line.split(maxsplit=5)
            if "-" in fields[0]:
                is_file = len(fields) == 6 and fields[4] != "0" and not fields[5].startswith("/memfd:")
                start, end = (int(part, 16) for part in fields[0].split("-"))
                current = (start, end) if is_file else None
            elif fields[0] == "Anonymous:" and current is not None and fields[1] == "0":
                self._ranges.append(current)

    def drop(self, tensor: torch.Tensor) -> None:
        """Take the whole pages of a CPU tensor out of this process' memory; reading brings them back.

        Nothing happens to a tensor that is not in such a mapping.
        """
        address = tensor.data_ptr() if tensor.device.type == "cpu" else 0
        first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
        last = (address + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if address and last > first and any(start <= first and last <= end for start, end in self._ranges):
            ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _DONTNEED)


def _left_in_groups(root: Path) -> list[int]:
    left = []
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            folder, names = root / "sys/fs/cgroup", ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            folder = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        group = folder / path.lstrip("/")
        # A container may see its own group as the root of all.
        for candidate in {folder, group, *(parent for parent in group.parents if folder in parent.parents)}:
            limit, used = (_number(candidate / name) for name in names)
            if limit is not None and used is not None:
                left.append(max(0, limit - used + _reclaimable(candidate)))
    return left


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None  # "max": no limit


def _reclaimable(group: Path) -> int:
    """Return the bytes of cached files that count for the group but go when memory is short."""
    try:
        lines = (group / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(("inactive_file ", "active_file ")))
