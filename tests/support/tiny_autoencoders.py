"""Tiny autoencoders of ComfyUI's own classes with random weights."""

from __future__ import annotations

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


def latent(*shape: int) -> torch.Tensor:
    """Return noise of a fixed seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(7))
