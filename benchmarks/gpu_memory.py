"""GPU memory that PyTorch's own peak does not show."""

from __future__ import annotations

import torch


def graph_pool_bytes() -> int:
    """Return the memory kept for CUDA graphs, which counts as allocated only while they are recorded."""
    segments = torch.cuda.memory_snapshot() if torch.cuda.is_available() else []
    return sum(segment["total_size"] for segment in segments if segment["segment_pool_id"] != (0, 0))
