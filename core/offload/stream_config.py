"""What the caller asked of weight streaming, checked once, before anything moves."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..errors import RequestError

GB = 2**30
_MAX_DEPTH = 16


@dataclass(frozen=True)
class StreamConfig:
    """One checked request.

    Attributes:
        vram_limit_bytes: Most target memory for weights; None: whatever the caller's memory manager gives.
        ram_limit_bytes: Most host memory for weights; what is above stays in its file. None: all of it.
        prefetch_depth: How many blocks may be on their way while one computes.
    """

    vram_limit_bytes: int | None = None
    ram_limit_bytes: int | None = None
    prefetch_depth: int = 1

    @staticmethod
    def from_request(*, vram_gb: float, ram_gb: float, prefetch_depth: int) -> StreamConfig:
        """Check what was asked and give it its units.

        Args:
            vram_gb: GB (2**30 bytes); 0 means auto.
            ram_gb: GB (2**30 bytes); 0 means all of the model.
            prefetch_depth: 0 copies each block when it is needed.

        Raises:
            RequestError: If a number is out of range.
        """
        if not isinstance(prefetch_depth, int) or isinstance(prefetch_depth, bool):
            depth_is_valid = False
        else:
            depth_is_valid = 0 <= prefetch_depth <= _MAX_DEPTH
        if not depth_is_valid:
            raise RequestError(
                f"prefetch_depth={prefetch_depth!r} was asked",
                limit=f"It is a number of blocks from 0 to {_MAX_DEPTH}",
                way_out="Use 1 or 2",
            )
        return StreamConfig(
            _check_size("VRAM budget", vram_gb), _check_size("RAM budget", ram_gb), prefetch_depth
        )


def _check_size(name: str, asked_gb: float) -> int | None:
    is_number = isinstance(asked_gb, (int, float)) and not isinstance(asked_gb, bool)
    if not is_number or not math.isfinite(asked_gb) or asked_gb < 0:
        raise RequestError(
            f"a {name} of {asked_gb!r} GB was asked",
            limit="It is a size in GB (2**30 bytes), zero or more",
            way_out="Type a number, or 0 for auto",
        )
    return int(asked_gb * GB) if asked_gb else None


def budget_too_small(name: str, config: StreamConfig, weight_bytes: int, least_bytes: int) -> RequestError:
    """Return the error for a model that cannot run within ``vram_limit_bytes``."""
    limit_bytes = config.vram_limit_bytes or 0
    return RequestError(
        f"a VRAM budget of {limit_bytes / GB:.3f} GB was asked for {name} ({weight_bytes / GB:.3f} GB of "
        "weights)",
        limit=f"With prefetch_depth {config.prefetch_depth} it takes at least {least_bytes / GB:.3f} GB: "
        "what is outside the blocks of every model that shares the budget, and room for the largest block "
        "in use and on its way",
        way_out="Raise the budget, or lower prefetch_depth",
    )


def ram_too_small(limit_bytes: int, needed_bytes: int, loose_bytes: int) -> RequestError:
    """Return the error for a model of which more is in memory than ``ram_limit_bytes``."""
    return RequestError(
        f"a RAM budget of {limit_bytes / GB:.3f} GB was asked",
        limit=f"{loose_bytes / GB:.3f} GB of the model's weights are not in its file as they are needed "
        "(another dtype, tensors that are joined) and have to be in RAM; with what shares the budget it "
        f"takes {needed_bytes / GB:.3f} GB",
        way_out="Raise the RAM budget (0: no limit), or load the file in its own dtype",
    )
