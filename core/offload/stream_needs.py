"""What streaming a model would take at least, asked before anything moves."""

from __future__ import annotations

from torch import nn

from .stream_blocks import plan_blocks
from .stream_masters import BlockMaster
from .stream_residents import least_needed


def least_stream_bytes(root: nn.Module, prefetch_depth: int) -> int:
    """Return the target memory without which a model cannot stream: its rim and the slots, or all of it.

    Args:
        root: The model; its tensors are only looked at.
        prefetch_depth: Blocks on their way while one computes.

    Raises:
        RequestError: If a tensor cannot be streamed.
    """
    blocks, _, rim = plan_blocks(root)
    cuts = [BlockMaster(block).cuts() for block in blocks]
    needed = least_needed(cuts, prefetch_depth + 1)
    return BlockMaster(rim).nbytes + min(sum(places[-1] for places in cuts), needed)
