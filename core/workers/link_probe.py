"""Try the links between GPUs in a process that may hang or crash; run as a script.

Faulty peer-to-peer set-ups (PCIe ACS, an IOMMU, some virtual machines) show as a hang that nothing inside
a process can end, or as wrong data without an error. Prints one JSON object on a line of its own: NCCL
prints to the same place when ``NCCL_DEBUG`` is set. The GPUs are those of ``CUDA_VISIBLE_DEVICES``.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

_COPY_BYTES = 64 << 20
_REPEATS = 4


def probe() -> dict[str, Any]:
    """Return what the GPUs are, how fast each pair copies, and whether copies and NCCL give right data."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    found: dict[str, Any] = {"gpus": [_describe(index) for index in range(count)], "links": [], "nccl": None}
    found["links"] = [_copy(one, other) for one in range(count) for other in range(count) if one != other]
    if count > 1:
        found["nccl"] = _all_reduce(count)
    return found


def _describe(index: int) -> dict[str, Any]:
    import torch

    properties = torch.cuda.get_device_properties(index)
    return {"name": properties.name, "uuid": str(properties.uuid), "total_bytes": properties.total_memory}


def _copy(source: int, target: int) -> dict[str, Any]:
    import torch

    pattern = torch.arange(_COPY_BYTES // 4, dtype=torch.int32, device=f"cuda:{source}")
    copied = torch.zeros_like(pattern, device=f"cuda:{target}")
    copied.copy_(pattern)
    right = torch.equal(copied.cpu(), pattern.cpu())
    for index in (source, target):
        torch.cuda.synchronize(index)
    begin = time.perf_counter()
    for _ in range(_REPEATS):
        copied.copy_(pattern)
    for index in (source, target):
        torch.cuda.synchronize(index)
    seconds = time.perf_counter() - begin
    return {
        "from": source,
        "to": target,
        "peer": torch.cuda.can_device_access_peer(source, target),
        "right": right,
        "bytes_per_s": _REPEATS * _COPY_BYTES / seconds,
    }


def _all_reduce(count: int) -> dict[str, Any]:
    import torch
    from torch.cuda import nccl

    values = [torch.full((1 << 20,), float(index + 1), device=f"cuda:{index}") for index in range(count)]
    nccl.all_reduce(values)
    expected = count * (count + 1) / 2
    right = all(bool((value == expected).all()) for value in values)
    return {"version": ".".join(map(str, nccl.version())), "right": right}


if __name__ == "__main__":
    sys.stdout.write(f"\n{json.dumps(probe())}\n")
