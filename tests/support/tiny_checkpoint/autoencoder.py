"""Train ComfyUI's own Wan 2.1 VAE class, 8 channels wide, on pictures.

Legend: `B` batch, `H` `W` pixels, 16 latent channels at H/8 x W/8, one frame.
Source of the architecture: Wan 2.1, arXiv:2503.20314.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from .pictures import PALETTES, SIZE_PX, paint

LATENT_CHANNELS = 16
_CROP_PX = 32
_LATENT_NOISE = 0.05


def build_autoencoder(generator: torch.Generator) -> nn.Module:
    """Return a WanVAE with seeded weights (ComfyUI's own layers leave them uninitialised)."""
    import comfy.ldm.wan.vae as wan_vae

    model = wan_vae.WanVAE(
        dim=8,
        z_dim=LATENT_CHANNELS,
        dim_mult=[1, 2, 4, 4],
        num_res_blocks=2,
        attn_scales=[],
        temperal_downsample=[False, True, True],
        dropout=0.0,
    )
    fill_weights(model, generator)
    for module in model.modules():
        if isinstance(module, wan_vae.ResidualBlock):
            nn.init.zeros_(module.residual[6].weight)  # a block starts as its shortcut: learns 3 times faster
    return model


def fill_weights(model: nn.Module, generator: torch.Generator) -> None:
    """Give every weight its start value: 1 for norms, 0 for biases, normal with 1/sqrt(fan-in) otherwise."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            leaf = name.rsplit(".", 1)[-1]
            is_norm = leaf == "gamma" or (leaf == "weight" and parameter.ndim == 1)
            if is_norm:
                parameter.fill_(1.0)
            elif leaf == "bias":
                parameter.zero_()
            else:
                fan_in = math.prod(parameter.shape[1:]) or 1
                parameter.normal_(0.0, 1.0 / math.sqrt(fan_in), generator=generator)


@contextlib.contextmanager
def single_frame_layers() -> Iterator[None]:
    """Inside the block, compute Wan's layers as one frame allows: the same results in half the time.

    A causal convolution pads the past with zeros, so of its kernel only the last slice in time meets
    a single frame; and the norm over channels needs no walk along a strided dimension.
    """
    from comfy.ldm.wan.vae import CausalConv3d, RMS_norm

    def convolve(self: nn.Conv3d, x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        kernel = self.weight[:, :, -1]
        return F.conv2d(x[:, :, 0], kernel, self.bias, padding=kernel.shape[-1] // 2).unsqueeze(2)

    def normalise(self: Any, x: torch.Tensor) -> torch.Tensor:
        inverse = (x.square().sum(dim=1, keepdim=True) + 1e-24).rsqrt()
        return x * (inverse * self.scale) * self.gamma

    originals = CausalConv3d.forward, RMS_norm.forward
    CausalConv3d.forward, RMS_norm.forward = convolve, normalise
    try:
        yield
    finally:
        CausalConv3d.forward, RMS_norm.forward = originals


def train_autoencoder(
    model: nn.Module,
    ink: torch.Tensor,
    *,
    steps: int,
    batch_size: int,
    generator: torch.Generator,
    report: Callable[[int, int], None],
) -> float:
    """Teach the VAE to rebuild crops of digits in every palette.

    Args:
        model: From `build_autoencoder`; trained in place.
        ink: ``(N, 1, 64, 64)`` fp32 in 0 to 1.
        steps: Optimizer steps.
        batch_size: Pictures a step.
        generator: Source of the order and of the noise.
        report: Called after every step with the steps that are done and all.

    Returns:
        The mean absolute error of the last 20 steps, in units of the 0 to 1 picture range.
    """
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=6e-3, betas=(0.9, 0.99), weight_decay=0.0, fused=True
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=6e-3, total_steps=steps, pct_start=0.15)
    errors: list[float] = []
    for step in range(steps):
        chosen = torch.randint(len(ink), (batch_size,), generator=generator)
        palette = torch.randint(len(PALETTES), (batch_size,), generator=generator)
        top, left = torch.randint(SIZE_PX - _CROP_PX + 1, (2,), generator=generator).tolist()
        crop = ink[chosen, :, top : top + _CROP_PX, left : left + _CROP_PX]
        target = paint(crop, palette).unsqueeze(2) * 2.0 - 1.0
        latent = model.encode(target)
        noise = torch.randn(latent.shape, generator=generator)
        rebuilt = model.decode(latent + _LATENT_NOISE * noise)
        # The last term keeps the latents near unit size, so that the noise above means something.
        loss = F.l1_loss(rebuilt, target) + F.mse_loss(rebuilt, target) + 1e-3 * latent.square().mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        errors.append(float((rebuilt - target).detach().abs().mean()) / 2.0)
        report(step + 1, steps)
    return sum(errors[-20:]) / len(errors[-20:])


def normalise_latents(model: Any, pictures: torch.Tensor, *, mean: torch.Tensor, std: torch.Tensor) -> None:
    """Fold a per-channel scale into the VAE so that its latents have Wan's published mean and deviation.

    ComfyUI's latent format then hands the denoiser latents of mean 0 and deviation 1. Exact: the two
    layers next to the latent are 1 x 1 x 1 convolutions.

    Args:
        model: The trained VAE; changed in place.
        pictures: ``(N, 3, H, W)`` in 0 to 1 to measure on.
        mean: ``(1, 16, 1, 1, 1)`` wanted mean (``latents_mean`` of ComfyUI's Wan21 format).
        std: ``(1, 16, 1, 1, 1)`` wanted deviation.
    """
    with torch.no_grad():
        latents = encode_pictures(model, pictures)
        seen_mean = latents.mean(dim=(0, 2, 3, 4))
        seen_std = latents.std(dim=(0, 2, 3, 4)).clamp_min(1e-4)
        scale = std.flatten() / seen_std
        shift = mean.flatten() - seen_mean * scale
        to_latent, from_latent = model.conv1, model.conv2
        to_latent.weight[:LATENT_CHANNELS] *= scale[:, None, None, None, None]
        to_latent.bias[:LATENT_CHANNELS] = to_latent.bias[:LATENT_CHANNELS] * scale + shift
        from_latent.bias -= (from_latent.weight[:, :, 0, 0, 0] * (shift / scale)).sum(dim=1)
        from_latent.weight /= scale[None, :, None, None, None]


def encode_pictures(model: Any, pictures: torch.Tensor) -> torch.Tensor:
    """Return the latents ``(N, 16, 1, H/8, W/8)`` of ``pictures`` ``(N, 3, H, W)`` in 0 to 1."""
    with torch.no_grad(), single_frame_layers():
        parts = [model.encode(part.unsqueeze(2) * 2.0 - 1.0) for part in pictures.split(128)]
    return torch.cat(parts)
