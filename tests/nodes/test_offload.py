"""The streaming nodes."""

from __future__ import annotations

import pytest
import torch
from ferry_support.tiny_patchers import PATCHERS

pytestmark = pytest.mark.comfy


def test_offload_model():
    from comfyui_ferry.nodes.offload import OffloadModel

    schema = OffloadModel.define_schema()
    schema.validate()
    assert [entry.id for entry in schema.inputs] == [
        "model",
        "vram_budget_gb",
        "prefetch_depth",
        "share_with",
    ]
    assert all(entry.tooltip for entry in schema.inputs)
    with torch.inference_mode():
        one, two = PATCHERS["wan"].build(), PATCHERS["wan"].build()
        first = OffloadModel.execute(one, vram_budget_gb=0.5, prefetch_depth=2).args[0]
        second = OffloadModel.execute(two, vram_budget_gb=0.5, prefetch_depth=2, share_with=first).args[0]
    pool = first.stream.streamer.pool
    assert first.model is not one.model and second.stream.streamer.pool is pool
    assert pool.config.vram_limit_bytes == 2**29 and pool.config.prefetch_depth == 2


def test_load_diffusion_model_offload(tmp_path, monkeypatch):
    import folder_paths
    from comfyui_ferry.core.errors import RequestError
    from comfyui_ferry.nodes.offload import LoadDiffusionModelOffload

    (tmp_path / "vae.safetensors").write_bytes(b"")
    monkeypatch.setitem(
        folder_paths.folder_names_and_paths, "diffusion_models", ([str(tmp_path)], {".safetensors"})
    )
    schema = LoadDiffusionModelOffload.define_schema()
    schema.validate()
    names = ["unet_name", "weight_dtype", "vram_budget_gb", "ram_budget_gb", "prefetch_depth", "share_with"]
    assert [entry.id for entry in schema.inputs] == names
    assert all(entry.tooltip for entry in schema.inputs)
    assert "vae.safetensors" in schema.inputs[0].options
    with pytest.raises(RequestError, match="not whole"):
        LoadDiffusionModelOffload.execute("vae.safetensors", "default", 0.0, 0.0, 1)
    with pytest.raises(RequestError, match="VRAM budget"):
        LoadDiffusionModelOffload.execute("vae.safetensors", "default", -1.0, 0.0, 1)
