"""A tiny CLIP and a tiny VAE: ComfyUI's own wrapper classes around small random networks.

They count what they encode, so that a test can see that nothing was encoded.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import nn


class _Tokenizer:
    """One token a word: its hash, below 997."""

    def __init__(self, **_: Any) -> None:
        pass

    def tokenize_with_weights(self, text: str, return_word_ids: bool = False, **_: Any) -> dict[str, Any]:
        words = ["<start>", *text.split()]
        ids = [int.from_bytes(hashlib.sha256(word.encode()).digest()[:4], "big") % 997 for word in words]
        return {"tiny": [[(number, 1.0) for number in ids]]}

    def state_dict(self) -> dict[str, Any]:
        return {}


class _TextEncoder(nn.Module):
    """Embeddings of the tokens; the pooled output is their mean."""

    def __init__(self, width: int, pooled: int, device: Any = None, dtype: Any = None, **_: Any) -> None:
        super().__init__()
        self.dtypes = {torch.float32}
        self.embedding = nn.Embedding(997, width, device=device, dtype=torch.float32)
        self.projection = nn.Linear(width, pooled, bias=False, device=device) if pooled else None
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            parameter.requires_grad_(False)
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
        self.encoded: list[int] = []

    def set_clip_options(self, options: dict[str, Any]) -> None:
        pass

    def reset_clip_options(self) -> None:
        pass

    def encode_token_weights(self, tokens: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor | None]:
        ids = [number for number, _ in tokens["tiny"][0]]
        self.encoded.append(len(ids))
        cond = self.embedding(torch.tensor([ids], device=self.embedding.weight.device)).cpu()
        pooled = None if self.projection is None else self.projection.cpu()(cond.mean(dim=1))
        return cond, pooled


def tiny_clip(*, width: int, pooled: int = 0) -> Any:
    """Return a ``comfy.sd.CLIP`` with embeddings of ``width`` and, unless 0, a pooled output."""
    import comfy.sd
    import comfy.supported_models_base

    target = comfy.supported_models_base.ClipTarget(_Tokenizer, _TextEncoder)
    target.params = {"width": width, "pooled": pooled}
    with torch.inference_mode():
        return comfy.sd.CLIP(target, parameters=0)


class _Autoencoder(nn.Module):
    """Patches of 8 x 8 pixels projected to the latent's channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, channels, 8, stride=8, bias=False)
        generator = torch.Generator().manual_seed(1)
        self.conv.weight.requires_grad_(False).copy_(
            torch.randn(self.conv.weight.shape, generator=generator) / 3
        )
        self.encoded: list[tuple[int, ...]] = []

    def encode(self, pixels: torch.Tensor, **_: Any) -> torch.Tensor:
        self.encoded.append(tuple(pixels.shape))
        if pixels.ndim == 4:
            return self.conv(pixels)
        frames = pixels[:, :, ::4]  # every fourth, the first alone: as video VAEs pack them
        return torch.stack([self.conv(frame) for frame in frames.unbind(2)], dim=2)


def tiny_vae(*, channels: int = 16, is_video: bool = False) -> Any:
    """Return a ``comfy.sd.VAE`` of 8 x 8 pixels a latent."""
    import comfy.model_patcher
    import comfy.sd
    import comfy.taesd.taesd

    with torch.inference_mode():
        shell = comfy.taesd.taesd.TAESD(latent_channels=channels).state_dict()
        vae = comfy.sd.VAE(sd=dict(shell))
        vae.first_stage_model = _Autoencoder(channels)
        vae.latent_channels = channels
        vae.patcher = comfy.model_patcher.ModelPatcher(
            vae.first_stage_model, load_device=vae.device, offload_device=torch.device("cpu")
        )
        vae.vae_dtype = torch.float32
        if is_video:
            vae.latent_dim, vae.not_video = 3, False
            vae.downscale_ratio = (lambda frames: (frames + 3) // 4, 8, 8)
            vae.upscale_ratio = (lambda frames: frames * 4 - 3, 8, 8)
    return vae
