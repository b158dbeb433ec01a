"""Tiny autoencoders of ComfyUI's own classes with random weights."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import nn

from .tiny_models import randomize


def build_kl(*, legacy: bool = True, batch_norm: bool = False) -> nn.Module:
    """Return an ``AutoencoderKL``, or without ``post_quant_conv`` an ``AutoencodingEngine`` (FLUX.1's).

    Args:
        legacy: Which of the two.
        batch_norm: Latents of 2 x 2 patches, normalised, as FLUX.2's.
    """
    from comfy.ldm.models.autoencoder import AutoencoderKL, AutoencodingEngine

    config: dict[str, Any] = {
        "double_z": True, "z_channels": 4, "resolution": 64, "in_channels": 3, "out_ch": 3, "ch": 32,
        "ch_mult": [1, 2, 2], "num_res_blocks": 1, "attn_resolutions": [], "dropout": 0.0,
    }  # fmt: skip
    if batch_norm:
        config["batch_norm_latent"] = True
    if legacy:
        model = AutoencoderKL(ddconfig=config, embed_dim=4)
    else:
        classes = "comfy.ldm.modules.diffusionmodules.model"
        model = AutoencodingEngine(
            regularizer_config={"target": "comfy.ldm.models.autoencoder.DiagonalGaussianRegularizer"},
            encoder_config={"target": f"{classes}.Encoder", "params": config},
            decoder_config={"target": f"{classes}.Decoder", "params": config},
        )
    return randomize(model.eval())


def build_wan(version: str) -> nn.Module:
    """Return a ``WanVAE`` of Wan "2.1" or "2.2"."""
    import comfy.ldm.wan.vae
    import comfy.ldm.wan.vae2_2

    module = comfy.ldm.wan.vae if version == "2.1" else comfy.ldm.wan.vae2_2
    widths = {"dim": 8} if version == "2.1" else {"dim": 8, "dec_dim": 8}
    model = module.WanVAE(z_dim=4, dim_mult=[1, 2, 2, 2], num_res_blocks=1,
                          temperal_downsample=[False, True, True], **widths)  # fmt: skip
    return randomize(model.eval())


def build_hunyuan_video(*, version: str) -> nn.Module:
    """Return HunyuanVideo's of version "1.0" or "1.5", or the "image" one of HunyuanImage 2.1.

    All have two frames a latent frame; 1.0 and "image" have group norms.
    """
    from comfy.ldm.models.autoencoder import AutoencoderKL, AutoencodingEngine

    if version == "1.0":
        config: dict[str, Any] = {
            "double_z": True, "z_channels": 4, "resolution": 64, "in_channels": 3, "out_ch": 3, "ch": 32,
            "ch_mult": [1, 2, 2], "num_res_blocks": 1, "attn_resolutions": [], "dropout": 0.0,
            "conv3d": True, "time_compress": 2,
        }  # fmt: skip
        return randomize(AutoencoderKL(ddconfig=config, embed_dim=4).eval())
    module = "comfy.ldm.hunyuan_video.vae" + ("" if version == "image" else "_refiner")
    params = {
        "z_channels": 4, "block_out_channels": [32, 64, 64], "in_channels": 3, "out_channels": 3,
        "num_res_blocks": 1, "ffactor_spatial": 4, "ffactor_temporal": 2,
    }  # fmt: skip
    model = AutoencodingEngine(
        regularizer_config={"target": "comfy.ldm.models.autoencoder.DiagonalGaussianRegularizer"},
        encoder_config={"target": f"{module}.Encoder", "params": params},
        decoder_config={"target": f"{module}.Decoder", "params": params},
    )
    return randomize(model.eval())


def build_ltx(*, noisy: bool = False) -> nn.Module:
    """Return LTX's, as LTX-2 has it; ``noisy`` adds noise to latents and layers, as LTX-Video 0.9.1 does."""
    from comfy.ldm.lightricks.vae.causal_video_autoencoder import VideoVAE

    model = VideoVAE(config=ltx_config(noisy=noisy))
    for buffer in model.per_channel_statistics.buffers():
        buffer.copy_(1 + 0.1 * latent(128))
    return randomize(model.eval())


def ltx_config(*, noisy: bool) -> dict[str, Any]:
    """Return how a file describes it."""
    return {
        "dims": 3, "in_channels": 3, "out_channels": 3, "latent_channels": 128, "norm_layer": "pixel_norm",
        "patch_size": 2, "causal_decoder": False, "timestep_conditioning": noisy, "decode_noise_scale": 0.3,
        "encoder_blocks": [["res_x", {"num_layers": 1}], ["compress_all", {}], ["compress_all", {}]],
        "decoder_blocks": [
            ["compress_all", {"residual": True, "multiplier": 2}],
            ["res_x", {"num_layers": 1, "inject_noise": noisy}],
            ["compress_all", {"residual": True, "multiplier": 2}],
            ["res_x", {"num_layers": 1, "inject_noise": noisy}],
        ],
        "encoder_base_channels": 8, "decoder_base_channels": 8,
    }  # fmt: skip


def wan_vae() -> Any:
    """Return a ``comfy.sd.VAE`` as the loader makes it from a file, 8 channels wide."""
    import comfy.ldm.wan.vae
    import comfy.sd

    model = comfy.ldm.wan.vae.WanVAE(
        dim=8, z_dim=16, dim_mult=[1, 2, 4, 4], num_res_blocks=2, temperal_downsample=[False, True, True]
    )
    return comfy.sd.VAE(sd=randomize(model).state_dict(), dtype=torch.float32)


def ltx_vae() -> Any:
    """Return LTX-Video's, whose file describes it in its metadata, and which draws noise."""
    import comfy.sd

    state = {name: tensor.clone() for name, tensor in build_ltx(noisy=True).state_dict().items()}
    metadata = {"config": json.dumps({"vae": ltx_config(noisy=True)})}
    return comfy.sd.VAE(sd=state, dtype=torch.float32, metadata=metadata)


def latent(*shape: int) -> torch.Tensor:
    """Return noise of a fixed seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(7))
