"""The live read-out of a streamed model: an event that the panel on its node shows (offload_panel.js)."""

from __future__ import annotations

import time
import weakref
from typing import Any

from ..offload import ModelStreamer, StreamStats
from .running_trainings import send_event

EVENT = "ferry.offload"
_INTERVAL_S = 1.0


class StreamReadout:
    """Shows, at most once a second, what the last pass of the model did.

    Args:
        streamer: The model's streamer.
        node_id: The node that shows it.
    """

    def __init__(self, streamer: ModelStreamer, node_id: str) -> None:
        self._streamer = weakref.ref(streamer)
        self._node_id = node_id
        self._shown_s = float("-inf")

    def __call__(self) -> None:
        """Show the present figures, if it is time."""
        streamer, now_s = self._streamer(), time.monotonic()
        if streamer is None or now_s - self._shown_s < _INTERVAL_S:
            return
        self._shown_s = now_s
        send_event(EVENT, readout_data(streamer.stats(), self._node_id))


def readout_data(stats: StreamStats, node_id: str) -> dict[str, Any]:
    """Return the event's data: blocks, bytes, and what the last measured pass waited for."""
    return {
        "node": node_id,
        "resident_blocks": stats.num_resident,
        "streamed_blocks": stats.num_streamed,
        "streamed_bytes": stats.streamed_bytes,
        "weight_bytes": stats.weight_bytes,
        "vram_bytes": stats.target_bytes,
        "ram_bytes": stats.host_bytes,
        "file_bytes": stats.file_bytes,
        "pass_s": stats.pass_s,
        "stall_percent": 100 * stats.stall_share,
        "bound_by": stats.bound_by,
    }
