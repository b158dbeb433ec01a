"""LTX-2's own text layers run in ComfyUI's process, on the host, unpatched or not at all."""

from __future__ import annotations

import pytest
import torch
from comfyui_ferry.core.comfy_adapter.text_layers import TextLayersInjection
from comfyui_ferry.core.errors import RequestError
from ferry_support.sampling import with_lora
from ferry_support.tiny_models import is_newer_comfyui, noise
from ferry_support.tiny_patchers import PATCHERS

pytestmark = pytest.mark.comfy


@pytest.fixture
def model():
    if not is_newer_comfyui():
        pytest.skip("this ComfyUI has no such model")
    return PATCHERS["ltx2"].build()


@torch.inference_mode()
def test_the_same_as_without_and_gone_afterwards(model):
    network, context, injection = model.model.diffusion_model, noise(1, 7, 40), TextLayersInjection()
    expected = network.preprocess_text_embeds(context, unprocessed=True)
    before = set(network.__dict__)
    injection.inject(model)
    assert set(network.__dict__) - before == {"preprocess_text_embeds"}
    assert torch.equal(network.preprocess_text_embeds(context, unprocessed=True), expected)
    TextLayersInjection().eject(model)  # another one's
    assert "preprocess_text_embeds" in network.__dict__
    injection.eject(model)
    assert set(network.__dict__) == before


@torch.inference_mode()
def test_a_lora_on_layers_that_run_is_refused(model):
    patched, context = with_lora(model), noise(1, 7, 40)
    assert any("embeddings_connector" in name for name in patched.patches)
    network, injection = model.model.diffusion_model, TextLayersInjection()
    injection.inject(patched)
    with pytest.raises(RequestError, match=r"patched text layers.*embeddings_connector"):
        network.preprocess_text_embeds(context, unprocessed=True)
    processed = noise(1, 7, 80)  # nothing is left to run
    assert torch.equal(network.preprocess_text_embeds(processed, unprocessed=False), processed)
    injection.eject(patched)
