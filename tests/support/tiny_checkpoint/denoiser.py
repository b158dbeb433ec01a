"""Train ComfyUI's own Wan 2.1 text-to-video class, 2 blocks of width 256, by flow matching.

Legend: `B` batch, `T` caption tokens, latents ``(B, 16, 1, H/8, W/8)``.
Source: flow matching, arXiv:2210.02747, in the convention of ComfyUI's ``ModelSamplingDiscreteFlow``:
x_sigma = (1 - sigma) x_0 + sigma noise, the network predicts noise - x_0 and is told 1000 sigma.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from .autoencoder import fill_weights

CAPTION_TOKENS = 4
CAPTION_WIDTH = 4096
SHIFT = 8.0
CONFIG: dict[str, Any] = {
    "model_type": "t2v",
    "dim": 256,
    "out_dim": 16,
    "num_heads": 2,
    "ffn_dim": 512,
    "num_layers": 2,
    "patch_size": (1, 2, 2),
    "freq_dim": 256,
    "window_size": (-1, -1),
    "qk_norm": True,
    "cross_attn_norm": True,
    "eps": 1e-6,
    "in_dim": 16,
}
"""What ComfyUI's ``detect_unet_config`` reads back from the saved file, in 0.3.75 and 0.33 alike."""


def build_denoiser(generator: torch.Generator) -> nn.Module:
    """Return a WanModel with seeded weights; its blocks start as the identity (adaLN-zero, 2212.09748)."""
    import comfy.ops
    from comfy.ldm.wan.model import WanModel

    model = WanModel(**CONFIG, dtype=torch.float32, device="cpu", operations=comfy.ops.disable_weight_init)
    fill_weights(model, generator)
    with torch.no_grad():
        for block in model.blocks:
            block.modulation.zero_()
        model.time_projection[1].weight.zero_()
        model.head.modulation.zero_()
        model.head.head.weight.zero_()
    return model


def make_captions(number: int, generator: torch.Generator) -> torch.Tensor:
    """Return one fixed random embedding per class, ``(number, T, 4096)`` fp32, in place of a text encoder."""
    return torch.randn(number, CAPTION_TOKENS, CAPTION_WIDTH, generator=generator)


def shift_sigma(uniform: torch.Tensor) -> torch.Tensor:
    """Return ComfyUI's sigmas for Wan 2.1: SHIFT u / (1 + (SHIFT - 1) u)."""
    return SHIFT * uniform / (1.0 + (SHIFT - 1.0) * uniform)


def train_denoiser(
    model: nn.Module,
    latents: torch.Tensor,
    classes: torch.Tensor,
    captions: torch.Tensor,
    *,
    steps: int,
    batch_size: int,
    generator: torch.Generator,
    report: Callable[[int, int], None],
) -> float:
    """Teach the denoiser ``latents`` given their captions; one in ten sees the empty one (arXiv:2207.12598).

    Args:
        model: From `build_denoiser`; trained in place, and left with the running mean of its weights.
        latents: ``(N, 16, 1, h, w)`` fp32, mean 0 and deviation 1 (after the latent format).
        classes: ``(N,)`` int64 rows of ``captions``.
        captions: ``(C + 1, T, 4096)``; the last one is the empty caption.
        steps: Optimizer steps.
        batch_size: Latents a step.
        generator: Source of everything random.
        report: Called after every step with the steps that are done and all.

    Returns:
        The mean loss (squared error of the velocity) of the last 20 steps.
    """
    empty = len(captions) - 1
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=3e-3, betas=(0.9, 0.98), weight_decay=0.0, fused=True
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=steps, pct_start=0.1)
    mean = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    losses: list[float] = []
    for step in range(steps):
        chosen = torch.randint(len(latents), (batch_size,), generator=generator)
        caption = classes[chosen]
        caption = torch.where(torch.rand(batch_size, generator=generator) < 0.1, empty, caption)
        uniform = torch.rand(batch_size, generator=generator)
        # Half as the sampler visits them, half uniform: at shift 8 alone fine detail is hardly ever seen.
        shifted = torch.rand(batch_size, generator=generator) < 0.5
        sigma = torch.where(shifted, shift_sigma(uniform), uniform).view(-1, 1, 1, 1, 1)
        clean = latents[chosen]
        noise = torch.randn(clean.shape, generator=generator)
        noisy = (1.0 - sigma) * clean + sigma * noise
        velocity = model(noisy, 1000.0 * sigma.flatten(), captions[caption])
        loss = F.mse_loss(velocity, noise - clean)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        decay = min(0.99, (1 + step) / (10 + step))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                mean[name].lerp_(parameter, 1.0 - decay)
        losses.append(float(loss.detach()))
        report(step + 1, steps)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(mean[name])
    return sum(losses[-20:]) / len(losses[-20:])
