"""What a streamed model shows on its node while it samples."""

from __future__ import annotations

import sys
import types

import pytest
import torch
from ferry_support.sampling import sample
from ferry_support.tiny_patchers import PATCHERS

pytestmark = pytest.mark.comfy


def test_shows_figures_at_most_once_a_second(monkeypatch):
    from comfyui_ferry.core.comfy_adapter import offload_model, stream_readout

    sent = []
    instance = types.SimpleNamespace(send_sync=lambda event, data: sent.append((event, data)))
    server = types.SimpleNamespace(PromptServer=types.SimpleNamespace(instance=instance))
    monkeypatch.setitem(sys.modules, "server", server)
    with torch.inference_mode():
        streamed = offload_model(PATCHERS["wan"].build(), vram_gb=0.0, node_id="7")
    sample(streamed, "wan", steps=2)
    assert len(sent) >= 1
    event, data = sent[0]
    stats = streamed.stream.streamer.stats()
    assert event == "ferry.offload" and data["node"] == "7"
    assert (data["resident_blocks"], data["streamed_blocks"], data["streamed_bytes"]) == (3, 0, 0)
    assert data["weight_bytes"] == stats.weight_bytes
    assert data["vram_bytes"] == stats.target_bytes == streamed.loaded_size()
    assert (
        0 <= data["stall_percent"] <= 100 and data["bound_by"] in ("link", "compute") and data["pass_s"] > 0
    )
    # A second call within the second shows nothing more.
    readout = stream_readout.StreamReadout(streamed.stream.streamer, "7")
    before = len(sent)
    readout()
    readout()
    assert len(sent) == before + 1
