"""LoRA files are taken whole by ComfyUI's loader, with the same effect, and name diffusers' own layers."""

from __future__ import annotations

import importlib
import types

import pytest
import torch
from comfyui_ferry.core.errors import SaveError
from comfyui_ferry.core.training import LoraAdapters, LoraConfig, select_targets
from ferry_support.merged_lora import merged
from ferry_support.tiny_models import is_newer_comfyui, noise
from ferry_support.tiny_patchers import PATCHERS

pytestmark = [pytest.mark.comfy, pytest.mark.timeout(120)]


def trained(model, targets=""):
    """A LoRA under ComfyUI's names whose every tensor is random, alpha / rank = 2."""
    return trained_on(model.model.diffusion_model, targets)


def trained_on(network, targets=""):
    layers = select_targets(network, targets)
    adapters = LoraAdapters(layers, LoraConfig(rank=2, alpha=4.0), seed=0, device="cpu")
    for index, adapter in enumerate(adapters.adapters().values()):
        adapter.lora_up.data.copy_(noise(*adapter.lora_up.shape, seed=index))
    return adapters.state_dict(prefix="diffusion_model.", dtype=torch.float32)


def portable(model, lora):
    from comfyui_ferry.core.comfy_adapter.portable_lora import portable_lora

    return portable_lora(model, lora, algorithm="LoRA")


@pytest.mark.parametrize("kind", ["flux", "flux2", "qwen", "sd3", "sdxl", "wan", "z-image"])
def test_comfyui_takes_every_key_and_merges_the_same(kind):
    import comfy.model_base
    from comfyui_ferry.core.comfy_adapter.lora_files import verify_lora

    model = PATCHERS[kind.removesuffix("2")].build()
    if kind == "flux2":
        model.model.__class__ = comfy.model_base.Flux2
    lora = trained(model)
    named = portable(model, lora)
    verify_lora(model, named)
    assert (named.keys() == lora.keys()) == (kind in ("flux", "qwen", "wan"))
    before, expected, actual = ({}, merged(model, lora), merged(model, named))
    before = model.model.state_dict()
    for name, value in expected.items():
        # A packed layer is patched in three parts; ComfyUI merges in fp32.
        torch.testing.assert_close(actual[name], value, rtol=1e-5, atol=1e-6)
    assert sum(not torch.equal(before[name], value) for name, value in expected.items()) > 5


def check_modules(network, lora):
    """Every tensor belongs to a Linear of diffusers' model and has its size."""
    down, up = "lora_A.weight", "lora_B.weight"
    layers = {name: layer for name, layer in network.named_modules() if isinstance(layer, torch.nn.Linear)}
    paths = {key.removesuffix(f".{down}") for key in lora if key.endswith(f".{down}")}
    assert paths <= layers.keys(), sorted(paths - layers.keys())[:5]
    for path in paths:
        if path.endswith(("w1", "w2", "w3")):
            continue  # the tiny model is of another width there
        assert lora[f"{path}.{down}"].shape[1] == layers[path].in_features
        assert lora[f"{path}.{up}"].shape[0] == layers[path].out_features
    assert len(lora) == 2 * len(paths)
    return paths


def test_diffusers_knows_every_layer_of_stable_diffusion_3():
    diffusers = pytest.importorskip("diffusers")
    model = PATCHERS["sd3"].build()
    network = diffusers.SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=16, num_layers=2, attention_head_dim=64,
        num_attention_heads=2, joint_attention_dim=40, caption_projection_dim=128, pooled_projection_dim=24,
        out_channels=16, pos_embed_max_size=8, qk_norm="rms_norm",
    )  # fmt: skip
    named = {
        key.removeprefix("transformer."): value for key, value in portable(model, trained(model)).items()
    }
    paths = check_modules(network, named)
    assert "transformer_blocks.0.attn.add_k_proj" in paths


def test_diffusers_knows_every_layer_of_z_image():
    diffusers = pytest.importorskip("diffusers")
    from comfyui_ferry.core.training.families import FAMILIES
    from diffusers.loaders import lora_conversion_utils

    model = PATCHERS["z-image"].build()
    targets = next(family.targets for family in FAMILIES if family.name == "Z-Image")
    with torch.device("meta"):
        network = diffusers.ZImageTransformer2DModel(
            dim=280, n_layers=2, n_refiner_layers=2, n_heads=5, n_kv_heads=5, cap_feat_dim=40,
            axes_dims=[8, 24, 24], axes_lens=[64] * 3, in_channels=16,
        )  # fmt: skip
    named = portable(model, trained(model, targets))
    converted = lora_conversion_utils._convert_non_diffusers_z_image_lora_to_diffusers(named)
    stripped = {key.removeprefix("transformer."): value for key, value in converted.items()}
    paths = check_modules(network, stripped)
    assert "layers.0.attention.to_q" in paths


def test_diffusers_knows_every_layer_of_sdxl():
    diffusers = pytest.importorskip("diffusers")
    from diffusers.loaders import lora_conversion_utils
    from diffusers.utils import convert_unet_state_dict_to_peft

    # SDXL's own shape, narrow: diffusers counts blocks by it.
    model = PATCHERS["sdxl"].build(
        model_channels=64, num_res_blocks=[2, 2, 2], channel_mult=[1, 2, 2],
        transformer_depth=[0, 0, 1, 1, 1, 1], transformer_depth_middle=1,
        transformer_depth_output=[0, 0, 0, 1, 1, 1, 1, 1, 1],
    )  # fmt: skip
    with torch.device("meta"):
        network = diffusers.UNet2DConditionModel(
            sample_size=32, in_channels=4, out_channels=4, block_out_channels=(64, 128, 128),
            layers_per_block=2, cross_attention_dim=40, attention_head_dim=(1, 2, 2),
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
            transformer_layers_per_block=1, use_linear_projection=True, norm_num_groups=32,
        )  # fmt: skip
    named = portable(model, trained(model))
    mapped = lora_conversion_utils._maybe_map_sgm_blocks_to_diffusers(named, network.config)
    converted, alphas = lora_conversion_utils._convert_non_diffusers_lora_to_diffusers(mapped)
    stripped = {key.removeprefix("unet."): value for key, value in converted.items()}
    peft = convert_unet_state_dict_to_peft(stripped)
    paths = check_modules(network, peft)
    assert len(alphas) == len(paths)


def size(lora, down, up):
    """The squared norm of what a LoRA changes, all layers together."""
    total = 0.0
    for name in lora:
        if name.endswith(down):
            stem = name.removesuffix(down)
            a, b, alpha = lora[name], lora[stem + up], lora.get(f"{stem}alpha")
            scale = 1.0 if alpha is None else float(alpha) / len(a)
            total += scale**2 * float((a @ a.T * (b.T @ b).T).sum())
    return total


FLUX = {
    "in_channels": 16, "out_channels": 16, "vec_in_dim": 24, "context_in_dim": 40, "hidden_size": 3072,
    "mlp_ratio": 4.0, "num_heads": 24, "depth": 1, "depth_single_blocks": 1, "axes_dim": [16, 56, 56],
    "theta": 10000, "patch_size": 2, "qkv_bias": True, "guidance_embed": True,
}  # fmt: skip
FLUX2 = FLUX | {
    "patch_size": 1, "mlp_ratio": 3.0, "hidden_size": 48, "num_heads": 3, "axes_dim": [4] * 4,
    "ops_bias": False, "qkv_bias": False, "global_modulation": True, "mlp_silu_act": True, "vec_in_dim": None,
}  # fmt: skip
QWEN = {
    "num_layers": 2, "attention_head_dim": 16, "num_attention_heads": 3, "joint_attention_dim": 40,
    "axes_dims_rope": (4, 6, 6), "in_channels": 64, "out_channels": 16, "patch_size": 2,
}  # fmt: skip
WAN = {"dim": 48, "num_heads": 3, "ffn_dim": 72, "num_layers": 2, "freq_dim": 16, "text_dim": 40}
LTX = {
    "in_channels": 8, "cross_attention_dim": 48, "attention_head_dim": 16, "num_attention_heads": 3,
    "caption_channels": 40, "num_layers": 2,
}  # fmt: skip
# ComfyUI's base class and network, diffusers' loader and network. FLUX.1's converter counts on its width.
AS_THEY_ARE = {
    "Flux": ("flux.model.Flux", FLUX, "FluxLoraLoaderMixin", "FluxTransformer2DModel", {
        "num_layers": 1, "num_single_layers": 1,
    }),
    "Flux2": ("flux.model.Flux", FLUX2, "Flux2LoraLoaderMixin", "Flux2Transformer2DModel", {
        "in_channels": 16, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16,
        "num_attention_heads": 3, "joint_attention_dim": 40, "axes_dims_rope": (4, 4, 4, 4),
    }),
    "QwenImage": (
        "qwen_image.model.QwenImageTransformer2DModel", QWEN, "QwenImageLoraLoaderMixin",
        "QwenImageTransformer2DModel", QWEN,
    ),
    "WAN21": ("wan.model.WanModel", WAN, "WanLoraLoaderMixin", "WanTransformer3DModel", {
        "num_attention_heads": 3, "attention_head_dim": 16, "text_dim": 40, "freq_dim": 16, "ffn_dim": 72,
        "num_layers": 2, "cross_attn_norm": True,
    }),
    "LTXV": ("lightricks.model.LTXVModel", LTX, "LTXVideoLoraLoaderMixin", "LTXVideoTransformer3DModel", LTX),
}  # fmt: skip


@pytest.mark.parametrize("kind", AS_THEY_ARE)
def test_diffusers_loads_the_files_of_other_families(kind):
    """By its pipelines' own reader of files: every layer is known, and all of the change arrives."""
    diffusers = pytest.importorskip("diffusers")
    import comfy.model_base
    import comfy.ops
    from comfyui_ferry.core.comfy_adapter import portable_lora as module
    from diffusers.loaders import lora_pipeline

    path, config, loader, name, theirs = AS_THEY_ARE[kind]
    package, _, attribute = path.rpartition(".")
    build = getattr(importlib.import_module(f"comfy.ldm.{package}"), attribute)
    newer = {"txt_ids_dims": []} if package == "flux.model" and is_newer_comfyui() else {}
    ours = build(
        **config, **newer, device="meta", dtype=torch.float32, operations=comfy.ops.disable_weight_init
    )
    base = object.__new__(getattr(comfy.model_base, kind))
    lora = trained_on(ours)
    changed = size(lora, "lora_down.weight", "lora_up.weight")  # diffusers scales some in place
    named = module.portable_lora(types.SimpleNamespace(model=base), lora, algorithm="LoRA")
    loaded = getattr(lora_pipeline, loader).lora_state_dict(dict(named))
    loaded = loaded[0] if isinstance(loaded, tuple) else loaded
    with torch.device("meta"):
        network = getattr(diffusers, name)(**theirs)
    check_modules(network, {key.removeprefix("transformer."): value for key, value in loaded.items()})
    assert size(loaded, "lora_A.weight", "lora_B.weight") == pytest.approx(changed, rel=1e-4)


def test_a_part_of_a_packed_layer_may_learn_nothing():
    """The queries of the last block's text, which goes nowhere."""
    from comfyui_ferry.core.comfy_adapter.lora_files import verify_lora

    model = PATCHERS["sd3"].build()
    named = portable(model, trained(model))
    packed = "transformer.transformer_blocks.1.attn.add_{}_proj.lora_B.weight"
    named[packed.format("q")].zero_()
    verify_lora(model, named)
    for part in "kv":
        named[packed.format(part)].zero_()
    with pytest.raises(SaveError, match=r"3 adapters are still all zero .*add_k_proj"):
        verify_lora(model, named)
