"""A streamed MODEL samples what the plain one does, bit for bit, and ComfyUI's figures are true."""

from __future__ import annotations

import gc
import itertools

import pytest
import torch
from comfyui_ferry.core.errors import RequestError
from ferry_support.sampling import prompts, sample, with_lora
from ferry_support.tiny_models import noise, randomize
from ferry_support.tiny_patchers import PATCHERS

pytestmark = pytest.mark.comfy

KINDS = ["flux", "qwen", "sd3", "sdxl", "wan", "z-image"]


@pytest.fixture(autouse=True)
def empty_memory():
    yield
    import comfy.model_management

    comfy.model_management.unload_all_models()


def offload(model, **settings):
    from comfyui_ferry.core.comfy_adapter import offload_model

    with torch.inference_mode():
        return offload_model(model, **({"vram_gb": 0.0} | settings))


def streamer(model):
    return model.stream.streamer


def budget_gb(model, share=0.5, **settings):
    """A budget between the least that runs and all weights."""
    probe = streamer(offload(model, **settings))
    return (probe.least_bytes + share * (probe.weight_bytes - probe.least_bytes)) / 2**30


def poison(model):
    """Overwrite the host masters of every resident block: whoever still reads them shows it."""
    for block in streamer(model)._blocks:
        if block.is_filled and block.is_resident:
            block.master.host.fill_(255)


@pytest.mark.parametrize("kind", KINDS)
def test_samples_alike_from_the_target_alone(kind):
    plain = PATCHERS[kind].build()
    state = {key: value.clone() for key, value in plain.model.state_dict().items()}
    expected = sample(plain, kind, steps=2)
    streamed = offload(plain, vram_gb=budget_gb(plain, prefetch_depth=0), prefetch_depth=0)
    assert torch.equal(sample(streamed, kind, steps=2), expected)
    stats = streamer(streamed).stats()
    assert stats.num_streamed > 0
    assert streamed.loaded_size() == stats.target_bytes <= streamed.model_size() < stats.weight_bytes
    # All of it resident, and the host's bytes gone: no weight is read from there.
    whole = offload(plain)
    assert torch.equal(sample(whole, kind, steps=2), expected)
    kept = [block.master.host.clone() for block in streamer(whole)._blocks]
    poison(whole)
    assert torch.equal(sample(whole, kind, steps=2), expected)
    for block, bytes_ in zip(streamer(whole)._blocks, kept, strict=True):
        block.master.host.copy_(bytes_)
    # The original is as it was, over the same bytes.
    assert torch.equal(sample(plain, kind, steps=2), expected)
    assert all(torch.equal(value, state[key]) for key, value in plain.model.state_dict().items())


def test_lora_strengths_change_without_a_reload_and_come_off():
    plain = PATCHERS["flux"].build(dtype=torch.bfloat16)
    streamed = offload(plain, vram_gb=budget_gb(plain))
    base = sample(plain, "flux", steps=1)
    host = [block.master.host.data_ptr() for block in streamer(streamed)._blocks]
    for strengths in ((1.0,), (0.3,), (0.3, -0.7, 1.5), ()):
        lora, streamed_lora = plain, streamed
        for strength in strengths:
            lora, streamed_lora = with_lora(lora, strength), with_lora(streamed_lora, strength)
        expected, actual = sample(lora, "flux", steps=1), sample(streamed_lora, "flux", steps=1)
        assert torch.equal(actual, expected)
        assert torch.equal(actual, base) == (not strengths)
    assert host == [block.master.host.data_ptr() for block in streamer(streamed)._blocks]
    key = "diffusion_model.double_blocks.0.img_attn.qkv.weight"
    merged = with_lora(streamed).get_key_patches()[key][0][0]
    assert torch.equal(merged, plain.model.state_dict()[key])


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.float32])
def test_patched_weights_are_those_of_comfyui(dtype):
    """The same bits as ``patch_weight_to_device``, seeded rounding included."""
    from comfyui_ferry.core.comfy_adapter.stream_patches import PatchValues, weight_changes

    plain = with_lora(with_lora(PATCHERS["wan"].build(), 0.9), -0.4)
    model = plain.model
    key = next(key for key in plain.patches if key.endswith("self_attn.q.weight"))
    weight = torch.nn.Parameter(model.state_dict()[key].to(dtype), requires_grad=False)
    layer = model.get_submodule(key.removesuffix(".weight"))
    layer.weight = weight
    changes = weight_changes(
        model, plain.patches, {}, values=PatchValues(torch.device("cpu")), master=lambda _: weight
    )
    actual = changes[key].apply(weight)
    plain.patch_weight_to_device(key, device_to=torch.device("cpu"))
    assert actual.dtype == layer.weight.dtype == dtype
    assert torch.equal(actual.view(torch.uint8), layer.weight.data.view(torch.uint8))
    assert not torch.equal(actual.float(), weight.float())


def test_weight_hooks_and_other_guiders():
    import comfy.hooks
    from ferry_support.sampling import guide_by_two

    plain = PATCHERS["qwen"].build()
    streamed = offload(plain, vram_gb=budget_gb(plain))
    lora = {}
    for side, shape in (("up", (48, 4)), ("down", (4, 48))):
        name = f"diffusion_model.transformer_blocks.1.attn.to_q.lora_{side}.weight"
        lora[name] = 0.3 * torch.randn(*shape, generator=torch.Generator().manual_seed(shape[0]))
    pictures = []
    for model in (plain, streamed):
        hooks = comfy.hooks.create_hook_lora(lora=lora, strength_model=0.8, strength_clip=0)
        hooked = sample(
            with_lora(model), "qwen", conditioning=prompts("qwen", positive={"hooks": hooks}), steps=2
        )
        pictures.append((hooked, sample(with_lora(model), "qwen", steps=2), guide_by_two(model, "qwen")))
    for plain_picture, streamed_picture in zip(*pictures, strict=True):
        assert torch.equal(plain_picture, streamed_picture)
    assert not torch.equal(pictures[0][0], pictures[0][1])


def test_comfyui_counts_it_and_gets_memory_back():
    import comfy.model_management as management

    streamed = offload(PATCHERS["wan"].build(num_layers=8))
    clone = streamed.clone()
    management.load_models_gpu([streamed])
    sample(streamed, "wan", steps=1)
    held = streamed.loaded_size()
    assert held == streamed.model_size() == streamer(streamed).weight_bytes == clone.loaded_size()
    entry = management.current_loaded_models[0]
    assert entry.model is streamed and entry.model_offloaded_memory() == 0
    # ComfyUI asks for a part, as it does when another model arrives: the rest stays, and works.
    assert entry.model_unload(held // 3) is False
    assert held // 3 <= held - streamed.loaded_size() and streamed.loaded_size() > 0
    before = sample(streamed, "wan", steps=1)
    # A clone takes over what is loaded; the old one's end takes nothing away.
    management.load_models_gpu([clone])
    assert [entry.model for entry in management.current_loaded_models] == [clone]
    del streamed
    gc.collect()
    assert clone.loaded_size() > 0
    assert torch.equal(sample(clone, "wan", steps=1), before)
    management.free_memory(1e30, clone.load_device)
    assert clone.loaded_size() == 0 and clone.current_loaded_device() == clone.offload_device
    assert not any("forward" in module.__dict__ for module in clone.model.modules())
    assert torch.equal(sample(clone, "wan", steps=1), before)


def test_train_lora_and_parallel_take_it():
    from comfyui_ferry.core.comfy_adapter import make_parallel
    from comfyui_ferry.core.comfy_adapter.trainable_model import borrowed_model

    plain = with_lora(PATCHERS["wan"].build())
    streamed = offload(plain, vram_gb=budget_gb(plain))
    expected = sample(streamed, "wan", steps=1)
    with borrowed_model(streamed, dtype=torch.float32, keep_on_host=True) as patcher:
        assert not any("forward" in module.__dict__ for module in patcher.model.modules())
        key = next(iter(streamed.patches))
        assert not torch.equal(patcher.model.state_dict()[key], plain.model.state_dict()[key])
    assert torch.equal(sample(streamed, "wan", steps=1), expected)
    parallel = make_parallel(streamed, gpus=2, cfg_degree=1, ulysses_degree=2)
    assert parallel.model is streamed.model and streamed.loaded_size() == 0


def test_refusals():
    model = PATCHERS["wan"].build()
    streamed = offload(model)
    with pytest.raises(RequestError, match="streams already"):
        offload(streamed)
    with pytest.raises(RequestError, match="VRAM budget"):
        offload(model, vram_gb=0.00001)
    with pytest.raises(RequestError, match="does not stream"):
        offload(model, share_with=model)
    with pytest.raises(RequestError, match="same budgets"):
        offload(model, share_with=streamed, prefetch_depth=3)
    with pytest.raises(RequestError, match="plain copy"):
        streamed.clone(force_deepcopy=True)
    with pytest.raises(RequestError, match="MultiGPU"):
        streamed.deepclone_multigpu()
    with pytest.raises(RequestError, match="for good"):
        streamed.patch_weight_to_device("diffusion_model.head.head.weight")
    compiled = streamed.clone()
    compiled.model_options["torch_compile_kwargs"] = {"backend": "inductor"}
    with pytest.raises(RequestError, match=r"torch\.compile"):
        sample(compiled, "wan", steps=1)
    streamed.add_weight_wrapper(next(iter(model.model.state_dict())), lambda weight: weight)
    with pytest.raises(RequestError, match="wrapped weights"):
        sample(streamed, "wan", steps=1)


def controlnet(plain):
    """A ControlNet for a UNet, and a Control-LoRA that takes the UNet's own weights."""
    import comfy.cldm.cldm
    import comfy.controlnet
    import comfy.ops

    config = {**plain.model.model_config.unet_config, "dtype": torch.float32, "device": None}
    config.pop("out_channels")
    config.pop("use_temporal_attention")
    with torch.inference_mode():
        network = comfy.cldm.cldm.ControlNet(
            hint_channels=3, operations=comfy.ops.disable_weight_init, **config
        )
        randomize(network)
    own = {
        name: value.clone()
        for name, value in network.state_dict().items()
        if name.startswith(("input_hint_block", "zero_convs", "middle_block_out"))
    }
    lora = {
        "time_embed.0.up": 0.1 * noise(256, 4),
        "time_embed.0.down": 0.1 * noise(4, 64),
        "lora_controlnet": torch.tensor([]),
    }
    yield comfy.controlnet.ControlNet(network, load_device=torch.device("cpu"))
    yield comfy.controlnet.ControlLora(own | lora)


def test_control_nets_and_control_loras():
    import nodes

    plain = PATCHERS["sdxl"].build()
    streamed = offload(plain, vram_gb=budget_gb(plain, 0.3))
    size = 8 * PATCHERS["sdxl"].latent_shape[-1]
    image, given = noise(1, size, size, 3).sigmoid(), prompts("sdxl")
    pictures = []
    for control in controlnet(plain):
        positive, negative = nodes.ControlNetApplyAdvanced().apply_controlnet(
            given["positive"], given["negative"], control, image, 0.9, 0.0, 1.0
        )
        conditioning = {"positive": positive, "negative": negative}
        # A Control-LoRA computes with patched weights, as the model does.
        for strength in (1.0, 0.0):
            expected, actual = (
                sample(with_lora(model, strength), "sdxl", conditioning=conditioning, steps=1)
                for model in (plain, streamed)
            )
            assert torch.equal(actual, expected)
            pictures.append(expected)
    assert all(not torch.equal(one, two) for one, two in itertools.combinations(pictures, 2))
    denoiser = streamed.model.diffusion_model
    state, host = denoiser.state_dict(), plain.model.diffusion_model.state_dict()
    assert state.keys() == host.keys() and all(torch.equal(state[name], host[name]) for name in host)
    streamed.unpatch_model(torch.device("cpu"))
    assert type(denoiser.state_dict()) is type(host)


def adapter_file(model, form):
    """An adapter of another kind than LoRA on every Linear of the first block."""
    state = {}
    for name, weight in model.model.diffusion_model.state_dict().items():
        if ".0." not in name or not name.endswith(".weight") or weight.ndim != 2:
            continue
        base, (rows, columns) = f"diffusion_model.{name.removesuffix('.weight')}", weight.shape
        if form == "dora":
            state[f"{base}.lora_up.weight"] = 0.1 * noise(rows, 4)
            state[f"{base}.lora_down.weight"] = 0.1 * noise(4, columns, seed=1)
            state[f"{base}.dora_scale"] = 1 + 0.1 * noise(rows, 1, seed=2)
        else:
            state[f"{base}.lokr_w1"] = 0.1 * noise(4, 4)
            state[f"{base}.lokr_w2"] = 0.1 * noise(rows // 4, columns // 4, seed=1)
    return state


def test_other_adapters_than_lora():
    import comfy.sd

    plain = PATCHERS["wan"].build(dtype=torch.bfloat16)
    streamed = offload(plain, vram_gb=budget_gb(plain, 0.4))
    for form in ("dora", "lokr"):
        pictures = []
        for model in (plain, streamed):
            patched = model
            for strength in (0.8, -0.5):
                patched = comfy.sd.load_lora_for_models(
                    patched, None, adapter_file(plain, form), strength, 0
                )[0]
            assert len(patched.patches) == 14
            pictures.append(sample(patched, "wan", steps=1))
        assert torch.equal(*pictures)
