"""Tiny, random MODELs: whole ``ModelPatcher`` objects of ComfyUI's own model classes, with inputs.

Built through ``comfy.supported_models``, so latent formats, sampling and conditioning are the real
ones. Everything is created in inference mode, as ComfyUI's loaders do.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from ferry_support.tiny_models import LTX2, is_newer_comfyui, noise, randomize

Options = dict[str, Any]


@dataclass(frozen=True)
class TinyPatcher:
    """One kind of MODEL.

    Args:
        build: Returns a MODEL (needs ComfyUI); keyword arguments change the network's configuration.
        latent_shape: ``(C, ...)`` of one latent that fits it.
        context_dim: Width of its text embedding.
        options: Conditioning options of one caption, from a seed.
        audio_shape: ``(C, ...)`` of the audio that comes with the latent, or None.
    """

    build: Callable[..., Any]
    latent_shape: tuple[int, ...]
    context_dim: int
    options: Callable[[int], Options]
    audio_shape: tuple[int, ...] | None = None

    def latent(self, seed: int = 0, batch: int = 1) -> Options:
        """Return a LATENT."""
        samples = noise(batch, *self.latent_shape, seed=seed)
        if self.audio_shape is None:
            return {"samples": samples}
        from comfy.nested_tensor import NestedTensor

        return {"samples": NestedTensor([samples, noise(batch, *self.audio_shape, seed=seed)])}

    def caption(self, seed: int = 0, tokens: int = 7) -> list:
        """Return a CONDITIONING of one entry."""
        return [[noise(1, tokens, self.context_dim, seed=seed), self.options(seed)]]


def build_patcher(kind: str, config: Options) -> Any:
    """Return a ``ModelPatcher`` with random weights on the CPU.

    ``config`` may hold ``load_device``, where it computes, ``dtype`` and ``operations`` (ComfyUI's
    ``custom_operations``) besides the network's values.
    """
    import comfy.model_patcher
    import comfy.supported_models

    load_device = torch.device(config.pop("load_device", "cpu"))
    dtype = config.pop("dtype", torch.float32)
    operations = config.pop("operations", None)
    with torch.inference_mode():
        settings = getattr(comfy.supported_models, kind)(config)
        settings.set_inference_dtype(dtype, None)
        settings.custom_operations = operations
        model = settings.get_model({}, "")
        for buffer in model.diffusion_model.buffers():
            if buffer.is_floating_point():  # position tables, which come from the checkpoint
                buffer.copy_(0.2 * noise(*buffer.shape))
        randomize(model.diffusion_model)
        host = torch.device("cpu")
        return comfy.model_patcher.ModelPatcher(model, load_device=load_device, offload_device=host)


def tiny_flux(**changes: Any) -> Any:
    """Return a FLUX.1-dev MODEL."""
    from comfy.ldm.flux.model import FluxParams

    config: Options = {
        "image_model": "flux", "in_channels": 16, "out_channels": 16, "vec_in_dim": 24, "context_in_dim": 40,
        "hidden_size": 48, "mlp_ratio": 4.0, "num_heads": 3, "depth": 2, "depth_single_blocks": 2,
        "axes_dim": [4, 6, 6], "theta": 10000, "patch_size": 2, "qkv_bias": True, "guidance_embed": True,
    }  # fmt: skip
    if "txt_ids_dims" in inspect.signature(FluxParams).parameters:
        config["txt_ids_dims"] = []
    return build_patcher("Flux", config | changes)


def tiny_qwen(**changes: Any) -> Any:
    """Return a Qwen-Image MODEL."""
    config: Options = {
        "image_model": "qwen_image", "patch_size": 2, "in_channels": 64, "out_channels": 16, "num_layers": 3,
        "attention_head_dim": 16, "num_attention_heads": 3, "joint_attention_dim": 40,
        "axes_dims_rope": (4, 6, 6),
    }  # fmt: skip
    return build_patcher("QwenImage", config | changes)


def tiny_wan(**changes: Any) -> Any:
    """Return a Wan text-to-video MODEL."""
    config: Options = {
        "image_model": "wan2.1", "model_type": "t2v", "dim": 48, "in_dim": 16, "out_dim": 16, "num_heads": 3,
        "ffn_dim": 72, "num_layers": 3, "patch_size": (1, 2, 2), "freq_dim": 16, "text_dim": 40,
    }  # fmt: skip
    return build_patcher("WAN21_T2V", config | changes)


def tiny_sd3(**changes: Any) -> Any:
    """Return a Stable Diffusion 3 MODEL."""
    config: Options = {
        "in_channels": 16, "patch_size": 2, "out_channels": 16, "depth": 2, "input_size": None,
        "adm_in_channels": 24, "num_patches": 64, "pos_embed_max_size": 8, "qk_norm": "rms",
        "pos_embed_scaling_factor": None, "x_block_self_attn_layers": [],
        "context_embedder_config": {
            "target": "torch.nn.Linear", "params": {"in_features": 40, "out_features": 128},
        },
    }  # fmt: skip
    return build_patcher("SD3", config | changes)


def tiny_z_image(**changes: Any) -> Any:
    """Return a Z-Image MODEL; five heads, as narrower ones cannot take their own modulation."""
    config: Options = {
        "image_model": "lumina2", "patch_size": 2, "in_channels": 16, "dim": 280, "n_layers": 2,
        "n_refiner_layers": 2, "n_heads": 5, "n_kv_heads": 5, "qk_norm": True, "cap_feat_dim": 40,
        "axes_dims": [8, 24, 24], "axes_lens": [64] * 3, "rope_theta": 256.0, "ffn_dim_multiplier": 8 / 3,
        "z_image_modulation": True, "time_scale": 1000.0, "pad_tokens_multiple": 8,
    }  # fmt: skip
    return build_patcher("ZImage", config | changes)


def tiny_sdxl(**changes: Any) -> Any:
    """Return an SDXL MODEL: a UNet that predicts noise."""
    config: Options = {
        "use_checkpoint": False, "image_size": 32, "out_channels": 4, "use_spatial_transformer": True,
        "legacy": False, "num_classes": "sequential", "adm_in_channels": 2816, "in_channels": 4,
        "model_channels": 64, "num_res_blocks": [1, 1], "transformer_depth": [1, 1], "channel_mult": [1, 2],
        "transformer_depth_middle": 1, "use_linear_in_transformer": True, "context_dim": 40,
        "num_head_channels": 64, "transformer_depth_output": [1, 1, 1, 1], "use_temporal_attention": False,
    }  # fmt: skip
    return build_patcher("SDXL", config | changes)


def tiny_ltx2(**changes: Any) -> Any:
    """Return an LTX-2 MODEL: video and audio. Newer ComfyUI only."""
    if not is_newer_comfyui():
        pytest.skip("this ComfyUI has no LTX-2")
    return build_patcher("LTXAV", LTX2 | {"image_model": "ltxav", "in_channels": 128} | changes)


def _flux_options(seed: int) -> Options:
    return {"pooled_output": noise(1, 24, seed=seed), "guidance": 3.5}


PATCHERS = {
    "flux": TinyPatcher(tiny_flux, (16, 8, 6), 40, _flux_options),
    "qwen": TinyPatcher(tiny_qwen, (16, 1, 8, 6), 40, lambda seed: {}),
    "wan": TinyPatcher(tiny_wan, (16, 2, 8, 6), 40, lambda seed: {}),
    "z-image": TinyPatcher(tiny_z_image, (16, 8, 6), 40, lambda seed: {}),
    "sd3": TinyPatcher(tiny_sd3, (16, 8, 6), 40, lambda seed: {"pooled_output": noise(1, 24, seed=seed)}),
    "ltx2": TinyPatcher(
        # As its text encoder leaves it: the model's own text layers have not run yet.
        tiny_ltx2,
        (128, 2, 3, 4),
        40,
        lambda seed: {"unprocessed_ltxav_embeds": True},
        (8, 5, 16),
    ),
    "sdxl": TinyPatcher(tiny_sdxl, (4, 8, 8), 40, lambda seed: {"pooled_output": noise(1, 1280, seed=seed)}),
}

# LTX-2's latent is two, video and audio; training refuses it.
TRAINABLE = [kind for kind, tiny in PATCHERS.items() if tiny.audio_shape is None]
