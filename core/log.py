"""One logger name for the whole pack.

ComfyUI loads a pack under a module name that is its file path, so ``__name__`` is no use as a
logger name. Worker processes add their rank to every line.
"""

from __future__ import annotations

import logging
import os
from collections.abc import MutableMapping
from typing import Any

_NAME = "comfyui_ferry"
RANK_VARIABLE = "COMFYUI_FERRY_RANK"


class _RankAdapter(logging.LoggerAdapter):
    """Prefix each line with the worker's rank, if this process is a worker."""

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Return the message with its prefix."""
        rank = os.environ.get(RANK_VARIABLE)
        return (msg if rank is None else f"[rank {rank}] {msg}"), kwargs


def get_logger(part: str) -> logging.LoggerAdapter:
    """Return the logger of one part of the pack, for example ``get_logger("offload")``."""
    return _RankAdapter(logging.getLogger(f"{_NAME}.{part}"), {})
