"""What streaming a model would take at least, asked before anything moves."""

from __future__ import annotations

from torch import nn

from .stream_blocks import plan_blocks
from .stream_masters import BlockMaster


def least_stream_bytes(root: nn.Module, prefetch_depth: int) -> int:
    """Return the target memory without which a model cannot stream: its rim and the slots, or all of it.

    Args:
        root: The model; its tensors are only looked at.
        prefetch_depth: Blocks on their way while one computes.

    Raises:
        RequestError: If a tensor cannot be streamed.
    """
    blocks, _, rim = plan_blocks(root)
    sizes = [BlockMaster(block).nbytes for block in blocks]
    rim_bytes = BlockMaster(rim).nbytes
    return min(rim_bytes + sum(sizes), rim_bytes + (prefetch_depth + 1) * max(sizes, default=0))
