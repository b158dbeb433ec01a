"""The live read-out of a streamed model: a line on its node and an event for the browser."""

from __future__ import annotations

import time
import weakref
from typing import Any

from ..offload import ModelStreamer, StreamStats
from .running_trainings import send_event, show_text

EVENT = "ferry.offload"
_INTERVAL_S = 1.0
_GB = 2**30


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
        stats = streamer.stats()
        send_event(EVENT, readout_data(stats, self._node_id))
        show_text(readout_text(stats), self._node_id)


def readout_data(stats: StreamStats, node_id: str) -> dict[str, Any]:
    """Return the event's data: blocks, bytes, and what the last measured pass waited for."""
    return {
        "node": node_id,
        "resident_blocks": stats.num_resident,
        "streamed_blocks": stats.num_streamed,
        "vram_bytes": stats.target_bytes,
        "ram_bytes": stats.host_bytes,
        "file_bytes": stats.file_bytes,
        "pass_s": stats.pass_s,
        "stall_percent": 100 * stats.stall_share,
        "bound_by": stats.bound_by,
    }


def readout_text(stats: StreamStats) -> str:
    """Return the line on the node."""
    text = (
        f"{stats.num_resident} blocks resident, {stats.num_streamed} streamed, "
        f"{stats.target_bytes / _GB:.2f} GB VRAM"
    )
    if not stats.pass_s:
        return text
    return f"{text}\nwaits {stats.stall_share:.0%} of a pass: {stats.bound_by}-bound"
