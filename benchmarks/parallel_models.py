"""Full-size denoisers with random weights and one call of each: ComfyUI's classes, and diffusers' beside."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Inputs = dict[str, Any]


@dataclass(frozen=True)
class Size:
    """What is sampled.

    Args:
        width: Pixels.
        height: Pixels.
        frames: Frames of a video; 1 for a picture.
    """

    width: int
    height: int
    frames: int = 1

    def __str__(self) -> str:
        return f"{self.width}x{self.height}" + (f", {self.frames} frames" if self.frames > 1 else "")


@dataclass(frozen=True)
class Denoiser:
    """One model of the benchmark.

    Args:
        build: Returns ComfyUI's class on a device in a dtype.
        inputs: Returns one call of it, for a size and a prompt number.
        rival: Returns diffusers' class on a device in a dtype, or None if it has none.
        rival_inputs: Returns one call of that.
    """

    build: Callable[[torch.device, torch.dtype], nn.Module]
    inputs: Callable[[Size, int], Inputs]
    rival: Callable[[torch.device, torch.dtype], nn.Module] | None = None
    rival_inputs: Callable[[Size, int], Inputs] | None = None


def noise(*shape: int, seed: int) -> torch.Tensor:
    """Return standard normal values on the CPU, the same in every process."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def finish(model: nn.Module) -> nn.Module:
    """Fill every weight with small noise and return the model, frozen."""
    device = next(model.parameters()).device
    if device.type == "meta":
        return model.eval()
    generator = torch.Generator(device).manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            # In the model's own dtype: a copy in fp32 would be the peak of the memory.
            parameter.normal_(std=parameter[0].numel() ** -0.5, generator=generator)
        else:
            parameter.normal_(std=0.02, generator=generator).add_(1.0)
    return model.eval().requires_grad_(False)


def _comfy(class_path: str, **config: Any) -> Callable[[torch.device, torch.dtype], nn.Module]:
    def build(device: torch.device, dtype: torch.dtype) -> nn.Module:
        import importlib

        import comfy.ops

        module, _, name = class_path.rpartition(".")
        cls = getattr(importlib.import_module(module), name)
        return finish(
            cls(**config, dtype=dtype, device=device, operations=comfy.ops.disable_weight_init).to(device)
        )

    return build


def _diffusers(name: str, **config: Any) -> Callable[[torch.device, torch.dtype], nn.Module]:
    def build(device: torch.device, dtype: torch.dtype) -> nn.Module:
        import diffusers

        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with device:
                return finish(getattr(diffusers, name)(**config))
        finally:
            torch.set_default_dtype(before)

    return build


def _qwen_inputs(
    size: Size, prompt: int, *, channels: int = 16, text: int = 256, width: int = 3584
) -> Inputs:
    return {
        "x": noise(1, channels, 1, size.height // 8, size.width // 8, seed=1),
        "timesteps": torch.tensor([0.5]),
        "context": noise(1, text, width, seed=10 + prompt),
    }


def _qwen_rival_inputs(
    size: Size, prompt: int, *, channels: int = 16, text: int = 256, width: int = 3584
) -> Inputs:
    rows, columns = size.height // 16, size.width // 16
    return {
        "hidden_states": noise(1, rows * columns, 4 * channels, seed=1),
        "encoder_hidden_states": noise(1, text, width, seed=10 + prompt),
        "encoder_hidden_states_mask": None,
        "timestep": torch.tensor([0.5]),
        "img_shapes": [[(1, rows, columns)]],
        "return_dict": False,
    }


def _flux_inputs(size: Size, prompt: int) -> Inputs:
    return {
        "x": noise(1, 16, size.height // 8, size.width // 8, seed=1),
        "timestep": torch.tensor([0.5]),
        "context": noise(1, 512, 4096, seed=10 + prompt),
        "y": noise(1, 768, seed=20 + prompt),
        "guidance": torch.tensor([3.5]),
    }


def _flux_rival_inputs(size: Size, prompt: int) -> Inputs:
    rows, columns = size.height // 16, size.width // 16
    ids = torch.zeros(rows, columns, 3)
    ids[..., 1], ids[..., 2] = torch.arange(rows)[:, None], torch.arange(columns)
    return {
        "hidden_states": noise(1, rows * columns, 64, seed=1),
        "encoder_hidden_states": noise(1, 512, 4096, seed=10 + prompt),
        "pooled_projections": noise(1, 768, seed=20 + prompt),
        "timestep": torch.tensor([0.5]),
        "guidance": torch.tensor([3.5]),
        "img_ids": ids.reshape(-1, 3),
        "txt_ids": torch.zeros(512, 3),
        "return_dict": False,
    }


def _video_latent(size: Size) -> torch.Tensor:
    return noise(1, 16, (size.frames - 1) // 4 + 1, size.height // 8, size.width // 8, seed=1)


def _wan_inputs(size: Size, prompt: int) -> Inputs:
    context = noise(1, 512, 4096, seed=10 + prompt)
    return {"x": _video_latent(size), "timestep": torch.tensor([500.0]), "context": context}


def _wan_rival_inputs(size: Size, prompt: int) -> Inputs:
    return {
        "hidden_states": _video_latent(size),
        "timestep": torch.tensor([500]),
        "encoder_hidden_states": noise(1, 512, 4096, seed=10 + prompt),
        "return_dict": False,
    }


def _z_image_inputs(size: Size, prompt: int) -> Inputs:
    return {
        "x": noise(1, 16, size.height // 8, size.width // 8, seed=1),
        "timesteps": torch.tensor([0.5]),
        "context": noise(1, 256, 2560, seed=10 + prompt),
        "num_tokens": 256,
    }


_QWEN_CLASS = "comfy.ldm.qwen_image.model.QwenImageTransformer2DModel"

DENOISERS: dict[str, Denoiser] = {
    "qwen-image": Denoiser(
        _comfy(_QWEN_CLASS, num_layers=60, in_channels=64),
        _qwen_inputs,
        _diffusers("QwenImageTransformer2DModel", num_layers=60),
        _qwen_rival_inputs,
    ),
    "flux1-dev": Denoiser(
        _comfy(
            "comfy.ldm.flux.model.Flux", in_channels=16, out_channels=16, vec_in_dim=768, context_in_dim=4096,
            hidden_size=3072, mlp_ratio=4.0, num_heads=24, depth=19, depth_single_blocks=38,
            axes_dim=[16, 56, 56], theta=10000, patch_size=2, qkv_bias=True, guidance_embed=True,
            txt_ids_dims=[],
        ),
        _flux_inputs,
        _diffusers("FluxTransformer2DModel", guidance_embeds=True),
        _flux_rival_inputs,
    ),
    "wan2.2-a14b": Denoiser(
        _comfy(
            "comfy.ldm.wan.model.WanModel", model_type="t2v", patch_size=(1, 2, 2), in_dim=16, dim=5120,
            ffn_dim=13824, freq_dim=256, text_dim=4096, out_dim=16, num_heads=40, num_layers=40,
        ),
        _wan_inputs,
        _diffusers("WanTransformer3DModel"),
        _wan_rival_inputs,
    ),
    "z-image": Denoiser(
        _comfy(
            "comfy.ldm.lumina.model.NextDiT", patch_size=2, in_channels=16, dim=3840, n_layers=30,
            n_refiner_layers=2, n_heads=30, n_kv_heads=30, qk_norm=True, cap_feat_dim=2560,
            axes_dims=[32, 48, 48], axes_lens=[1536, 512, 512], rope_theta=256.0, ffn_dim_multiplier=8 / 3,
            z_image_modulation=True, time_scale=1000.0, pad_tokens_multiple=32,
        ),
        _z_image_inputs,
    ),
    "tiny": Denoiser(
        _comfy(
            _QWEN_CLASS, patch_size=2, in_channels=16, out_channels=4, num_layers=2, attention_head_dim=16,
            num_attention_heads=4, joint_attention_dim=40, axes_dims_rope=(4, 6, 6),
        ),
        lambda size, prompt: _qwen_inputs(size, prompt, channels=4, text=8, width=40),
        _diffusers(
            "QwenImageTransformer2DModel", patch_size=2, in_channels=16, out_channels=4, num_layers=2,
            attention_head_dim=16, num_attention_heads=4, joint_attention_dim=40, axes_dims_rope=(4, 6, 6),
        ),
        lambda size, prompt: _qwen_rival_inputs(size, prompt, channels=4, text=8, width=40),
    ),
}  # fmt: skip
