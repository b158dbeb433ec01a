"""LoRA files are taken whole by ComfyUI's loader, with the same effect, and name diffusers' own layers."""

from __future__ import annotations

import pytest
import torch
from comfyui_ferry.core.errors import SaveError
from comfyui_ferry.core.training import LoraAdapters, LoraConfig, select_targets
from ferry_support.merged_lora import merged
from ferry_support.tiny_models import noise
from ferry_support.tiny_patchers import PATCHERS

pytestmark = [pytest.mark.comfy, pytest.mark.timeout(120)]


def trained(model, targets=""):
    """A LoRA under ComfyUI's names whose every tensor is random, alpha / rank = 2."""
    layers = select_targets(model.model.diffusion_model, targets)
    adapters = LoraAdapters(layers, LoraConfig(rank=2, alpha=4.0), seed=0, device="cpu")
    for index, adapter in enumerate(adapters.adapters().values()):
        adapter.lora_up.data.copy_(noise(*adapter.lora_up.shape, seed=index))
    return adapters.state_dict(prefix="diffusion_model.", dtype=torch.float32)


def portable(model, lora):
    from comfyui_ferry.core.comfy_adapter.portable_lora import portable_lora

    return portable_lora(model, lora, algorithm="LoRA")


@pytest.mark.parametrize("kind", ["flux", "qwen", "sd3", "sdxl", "wan", "z-image"])
def test_comfyui_takes_every_key_and_merges_the_same(kind):
    from comfyui_ferry.core.comfy_adapter.lora_files import verify_lora

    model = PATCHERS[kind].build()
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
