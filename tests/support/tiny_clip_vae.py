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

    def __init__(
        self, width: int, pooled: int, more: dict[str, Any], device: Any = None, dtype: Any = None, **_: Any
    ) -> None:
        super().__init__()
        self.more = more
        self.dtypes = {torch.float32}
        self.embedding = nn.Embedding(997, width, device=device, dtype=torch.float32)
        self.projection = nn.Linear(width, pooled, bias=False, device=device) if pooled else None
        # Real text encoders with other options are of other classes; a cache tells these by their weights.
        told = hashlib.sha256(repr(sorted(more.items())).encode()).digest()[:8]
        self.register_buffer("told_options", torch.tensor(list(told), dtype=torch.uint8, device=device))
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            parameter.requires_grad_(False)
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
        self.encoded: list[int] = []

    def set_clip_options(self, options: dict[str, Any]) -> None:
        pass

    def reset_clip_options(self) -> None:
        pass

    def encode_token_weights(self, tokens: dict[str, Any]) -> tuple[Any, ...]:
        ids = [number for number, _ in tokens["tiny"][0]]
        self.encoded.append(len(ids))
        cond = self.embedding(torch.tensor([ids], device=self.embedding.weight.device)).cpu()
        pooled = None if self.projection is None else self.projection.cpu()(cond.mean(dim=1))
        more = dict(self.more)
        if more.pop("attention_mask", False):
            more["attention_mask"] = torch.ones(1, len(ids), dtype=torch.long)
        return (cond, pooled, more) if more else (cond, pooled)


def tiny_clip(*, width: int, pooled: int = 0, more: dict[str, Any] | None = None) -> Any:
    """Return a ``comfy.sd.CLIP`` with embeddings of ``width`` and, unless 0, a pooled output.

    ``more`` goes into the options of its conditionings; ``attention_mask=True`` becomes a mask of ones.
    """
    import comfy.sd
    import comfy.supported_models_base

    target = comfy.supported_models_base.ClipTarget(_Tokenizer, _TextEncoder)
    target.params = {"width": width, "pooled": pooled, "more": more or {}}
    with torch.inference_mode():
        return comfy.sd.CLIP(target, parameters=0)


class _Autoencoder(nn.Module):
    """Patches of ``patch`` x ``patch`` pixels projected to the latent's channels, and back.

    Of every ``stride`` frames one is kept, the first alone, as video VAEs pack them.
    """

    def __init__(self, channels: int, patch: int = 8, stride: int = 4) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, channels, patch, stride=patch, bias=False)
        self.patch, self.stride = patch, stride
        generator = torch.Generator().manual_seed(1)
        self.conv.weight.requires_grad_(False).copy_(
            torch.randn(self.conv.weight.shape, generator=generator) * 8 / 3 / patch
        )
        self.encoded: list[tuple[int, ...]] = []

    def encode(self, pixels: torch.Tensor, **_: Any) -> torch.Tensor:
        self.encoded.append(tuple(pixels.shape))
        if pixels.ndim == 4:
            return self.conv(pixels)
        frames = pixels[:, :, :: self.stride]
        return torch.stack([self.conv(frame) for frame in frames.unbind(2)], dim=2)

    def decode(self, latent: torch.Tensor, **_: Any) -> torch.Tensor:
        if latent.ndim == 4:
            return self._pixels(latent)
        frames = [self._pixels(frame) for frame in latent.unbind(2)]
        repeated = [frames[0]] + [frame for frame in frames[1:] for _ in range(self.stride)]
        return torch.stack(repeated, dim=2)

    def _pixels(self, latent: torch.Tensor) -> torch.Tensor:
        colours = latent[:, :3] if latent.shape[1] >= 3 else latent.repeat(1, 3, 1, 1)[:, :3]
        return nn.functional.interpolate(colours.tanh(), scale_factor=self.patch)


def tiny_vae(*, channels: int = 16, is_video: bool = False, patch: int = 8, stride: int = 4) -> Any:
    """Return a ``comfy.sd.VAE``: ``patch`` x ``patch`` pixels and, for video, ``stride`` frames a latent."""
    import comfy.model_patcher
    import comfy.sd
    import comfy.taesd.taesd

    with torch.inference_mode():
        vae = comfy.sd.VAE(sd=dict(comfy.taesd.taesd.TAESD(latent_channels=16).state_dict()))
        vae.first_stage_model = _Autoencoder(channels, patch, stride)
        vae.latent_channels = channels
        vae.patcher = comfy.model_patcher.ModelPatcher(
            vae.first_stage_model, load_device=vae.device, offload_device=torch.device("cpu")
        )
        vae.vae_dtype = torch.float32
        vae.downscale_ratio = vae.upscale_ratio = patch
        if is_video:
            vae.latent_dim, vae.not_video = 3, False
            vae.downscale_ratio = (lambda frames: (frames + stride - 1) // stride, patch, patch)
            vae.upscale_ratio = (lambda frames: frames * stride - stride + 1, patch, patch)
            vae.downscale_index_formula = vae.upscale_index_formula = (stride, patch, patch)
    return vae
