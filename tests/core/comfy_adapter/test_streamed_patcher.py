"""What else nodes ask of a MODEL than to sample: to be called when it is loaded, and to be saved."""

from __future__ import annotations

import pytest
import torch
from comfyui_ferry.core.errors import RequestError
from ferry_support.quantized_patchers import quantized_patcher
from ferry_support.sampling import sample, with_lora
from ferry_support.tiny_models import is_newer_comfyui
from ferry_support.tiny_patchers import PATCHERS
from safetensors.torch import load_file

pytestmark = pytest.mark.comfy


def offload(model, share=None):
    """Stream a MODEL, within a budget between the least that runs (0) and all weights (1)."""
    from comfyui_ferry.core.comfy_adapter import offload_model

    with torch.inference_mode():
        streamed = offload_model(model, vram_gb=0.0)
        if share is None:
            return streamed
        streamer = streamed.stream.streamer
        budget_bytes = streamer.least_bytes + share * (streamer.weight_bytes - streamer.least_bytes)
        return offload_model(model, vram_gb=budget_bytes / 2**30)


def test_nodes_that_swap_blocks_themselves_change_nothing():
    """They move blocks when the MODEL has been loaded; here to another dtype, as the CPU has one memory."""
    from comfy.patcher_extension import CallbacksMP

    plain, called = PATCHERS["wan"].build(), []
    expected = sample(plain, "wan", steps=2)

    def swap(patcher, device, *arguments):
        called.append((device, len(arguments)))
        patcher.model.diffusion_model.double()

    for share in (0.5, None):
        streamed = offload(plain, share)
        streamed.add_callback(CallbacksMP.ON_LOAD, swap)
        for _ in range(2):  # what stays is bound the second time
            assert torch.equal(sample(streamed, "wan", steps=2), expected)
        assert {tensor.dtype for tensor in streamed.model.state_dict().values()} == {torch.float32}
    assert set(called) == {(streamed.load_device, 3)}


def save(path, model):
    import comfy.sd

    with torch.inference_mode():
        comfy.sd.save_checkpoint(str(path), model)
    return load_file(path)


def patched(model):
    """Return the MODEL with patches of layers, and of a weight of no layer."""
    patched = with_lora(model)
    patched.add_patches({"diffusion_model.blocks.1.modulation": ("diff", (torch.ones(1, 6, 48),))})
    return patched


def assert_same(one, other):
    assert set(one) == set(other)
    for name in one:
        assert one[name].dtype == other[name].dtype, name
        assert torch.equal(one[name].float(), other[name].float()), name


@pytest.mark.parametrize("form", ["bf16", "float8_e4m3fn", "nvfp4"])
def test_writes_what_the_plain_model_writes(form, tmp_path):
    """Loaded or not, and patched; quantized weights are plain tensors in a file, beside their scales."""
    if form == "bf16":
        plain = PATCHERS["wan"].build(dtype=torch.bfloat16)
    elif is_newer_comfyui():
        plain = quantized_patcher("wan", form)
    else:
        pytest.skip("this ComfyUI loads no such weights")
    streamed = offload(plain, 0.4)
    files = [save(tmp_path / "plain", plain), save(tmp_path / "patched", patched(plain))]
    assert_same(save(tmp_path / "streamed", streamed), files[0])
    if not is_newer_comfyui():
        with pytest.raises(RequestError, match="must hold its patched weights"):
            save(tmp_path / "streamed", patched(streamed))
        return
    sample(patched(streamed), "wan", steps=1)
    assert_same(save(tmp_path / "streamed", patched(streamed)), files[1])
    # Those who read the running model (a Control-LoRA) get the same plain tensors.
    state = streamed.model.diffusion_model.state_dict()
    prefix = "model.diffusion_model."
    running = {name: state[name.removeprefix(prefix)] for name in files[1]}
    expected = {name: value for name, value in files[1].items() if not name.endswith(".modulation")}
    assert_same({name: running[name] for name in expected}, expected)
    with pytest.raises(AssertionError):
        assert_same(files[0], files[1])
