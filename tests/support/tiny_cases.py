"""Calls of tiny models that reach every part of their plans: one for each special input."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from .tiny_models import (
    Inputs,
    build_flux,
    build_hunyuan,
    build_ltxav,
    build_ltxv,
    build_qwen,
    build_sd3,
    build_sdxl,
    build_wan,
    build_z_image,
    flux2_call,
    flux_call,
    hunyuan_call,
    ltxav_call,
    ltxv_call,
    noise,
    qwen_call,
    sd3_call,
    sdxl_call,
    wan_call,
    z_image_call,
)


@dataclass(frozen=True)
class TinyCase:
    """One model and one call of it.

    Args:
        build: Returns the model (needs ComfyUI).
        inputs: Returns the keyword arguments of one call of its ``_forward``.
        newer_only: Whether 0.3.75 lacks it.
    """

    build: Callable[[], nn.Module]
    inputs: Callable[[], Inputs]
    newer_only: bool = False


def residuals(
    count: int, tokens: int, seed: int = 0, width: int = 48, *, batch: int = 1
) -> list[torch.Tensor | None]:
    """Return ControlNet residuals for ``count`` blocks, every second one None."""
    return [
        noise(batch, tokens, width, seed=seed + index) if index % 2 == 0 else None for index in range(count)
    ]


def _flux_control() -> Inputs:
    return {"input": residuals(2, 35, batch=2), "output": residuals(2, 35, seed=7, batch=2)}


def _shift_text(inputs: Inputs) -> Inputs:
    """A ``post_input`` patch that mixes tokens, which is right only on the whole sequence."""
    return inputs | {"txt": inputs["txt"] + inputs["img"].mean(1, keepdim=True)}


def _long_text_mask() -> torch.Tensor:
    """An attention mask [L, L] for 11 text and 35 image tokens, different for every pair."""
    return noise(46, 46, seed=3)


_KONTEXT_REFS = (noise(2, 4, 8, 6), noise(2, 4, 6, 10))
_QWEN_REFS = (noise(1, 4, 1, 8, 6), noise(1, 4, 1, 6, 6))
_NO_VEC: Inputs = {"vec_in_dim": None, "guidance_embed": False, "txt_ids_dims": [1, 2]}
_LONGCAT_SHIFT = {"rope_options": {"shift_t": 1.0, "shift_y": 9.0, "shift_x": 9.0}}
_PADDED_TEXT = torch.cat([torch.ones(2, 7), torch.tensor([[1.0] * 4, [0.0] * 4])], dim=1).long()

FLUX_CASES = {
    "flux1-dev": TinyCase(build_flux, flux_call),
    "flux1-dev batch 2": TinyCase(build_flux, lambda: flux_call(batch=2)),
    "flux1-dev full mask": TinyCase(build_flux, lambda: flux_call(attention_mask=_long_text_mask())),
    "flux1-dev short text": TinyCase(build_flux, lambda: flux_call(text=2)),
    "flux1-kontext control": TinyCase(
        build_flux, lambda: flux_call(batch=2, ref_latents=list(_KONTEXT_REFS), control=_flux_control())
    ),
    "flux1-dev post_input": TinyCase(
        build_flux, lambda: flux_call(transformer_options={"patches": {"post_input": [_shift_text]}})
    ),
    "longcat": TinyCase(
        lambda: build_flux(context_in_dim=56, **_NO_VEC),
        lambda: flux_call(batch=2, context=56, text=9, transformer_options=dict(_LONGCAT_SHIFT)),
        newer_only=True,
    ),
    "longcat-edit": TinyCase(
        lambda: build_flux(context_in_dim=56, **_NO_VEC),
        lambda: flux_call(
            batch=2,
            context=56,
            text=9,
            ref_latents=[noise(2, 4, 8, 6)],
            transformer_options=dict(_LONGCAT_SHIFT),
        ),
        newer_only=True,
    ),
    "ovis": TinyCase(
        lambda: build_flux(context_in_dim=32, yak_mlp=True, txt_norm=True, **_NO_VEC),
        lambda: flux_call(batch=2, context=32, text=9),
        newer_only=True,
    ),
    "flux2-klein": TinyCase(lambda: build_flux(flux2=True), flux2_call),
    "flux2-dev refs": TinyCase(
        lambda: build_flux(flux2=True, guidance_embed=True),
        lambda: flux2_call(batch=2, guidance=torch.tensor([3.5, 2.0]), ref_latents=[noise(2, 8, 4, 3)]),
    ),
    "flux2 timestep zero": TinyCase(
        lambda: build_flux(flux2=True),
        lambda: flux2_call(
            batch=2, ref_latents=[noise(2, 8, 4, 3)], ref_latents_method="index_timestep_zero"
        ),
        newer_only=True,
    ),
}

QWEN_CASES = {
    "qwen": TinyCase(build_qwen, qwen_call),
    "qwen text mask, batch 2": TinyCase(build_qwen, lambda: qwen_call(batch=2, attention_mask=_PADDED_TEXT)),
    "qwen short text": TinyCase(build_qwen, lambda: qwen_call(text=2)),
    "qwen edit, control": TinyCase(
        build_qwen,
        lambda: qwen_call(
            batch=2,
            ref_latents=[noise(2, 4, 1, *size) for size in ((8, 6), (6, 6))],
            control={"input": residuals(2, 35, batch=2)},
        ),
    ),
    "qwen edit-2509": TinyCase(
        build_qwen,
        lambda: qwen_call(
            batch=2,
            attention_mask=_PADDED_TEXT,
            ref_latents=[noise(2, 4, 1, *size) for size in ((8, 6), (6, 6), (4, 10))],
        ),
    ),
    "qwen edit-2511": TinyCase(
        lambda: build_qwen(default_ref_method="index_timestep_zero"),
        lambda: qwen_call(ref_latents=list(_QWEN_REFS)),
        newer_only=True,
    ),
    "qwen layered": TinyCase(
        lambda: build_qwen(default_ref_method="negative_index", use_additional_t_cond=True),
        lambda: qwen_call(batch=2, x=noise(2, 4, 3, 8, 6), ref_latents=[noise(2, 4, 1, 8, 6)]),
        newer_only=True,
    ),
}

WAN_CASES = {
    "wan t2v": TinyCase(build_wan, wan_call),
    "wan t2v batch 2": TinyCase(build_wan, lambda: wan_call(batch=2)),
    "wan i2v": TinyCase(lambda: build_wan(in_dim=9), lambda: wan_call(batch=2, channels=9)),
    "wan ti2v": TinyCase(
        build_wan,
        lambda: wan_call(batch=2, timestep=torch.tensor([[0.0, 300.0, 700.0], [0.0, 700.0, 700.0]])),
    ),
    "wan2.1 i2v clip": TinyCase(
        lambda: build_wan(model_type="i2v", in_dim=9),
        lambda: wan_call(batch=2, channels=9, clip_fea=noise(2, 257, 1280)),
    ),
    "wan reference, frame timesteps": TinyCase(
        lambda: build_wan(in_dim_ref_conv=4),
        lambda: wan_call(
            reference_latent=noise(1, 4, 10, 8), timestep=torch.tensor([[0.0, 0.0, 300.0, 700.0]])
        ),
    ),
    "wan time concat": TinyCase(build_wan, lambda: wan_call(time_dim_concat=noise(1, 4, 1, 10, 7))),
    "wan context latents": TinyCase(
        build_wan,
        lambda: wan_call(context_latents=[noise(1, 4, 1, 6, 7)]),
        newer_only=True,
    ),
}

Z_IMAGE_CASES = {
    "z-image": TinyCase(build_z_image, z_image_call),
    "z-image batch 2": TinyCase(build_z_image, lambda: z_image_call(batch=2, text=16)),
    "lumina 2": TinyCase(
        lambda: build_z_image(
            dim=288,
            n_heads=6,
            n_kv_heads=2,
            axes_dims=[16] * 3,
            z_image_modulation=False,
            pad_tokens_multiple=None,
            rope_theta=10000.0,
        ),
        lambda: z_image_call(batch=2),
    ),
    "z-image references": TinyCase(
        lambda: build_z_image(siglip_feat_dim=20),
        lambda: z_image_call(
            ref_latents=[noise(1, 4, 6, 8)],
            ref_contexts=[noise(1, 7, 40)],
            siglip_feats=[noise(1, 3, 4, 20)],
        ),
        newer_only=True,
    ),
}

SD3_CASES = {
    "sd3.5-large": TinyCase(build_sd3, lambda: sd3_call(batch=2)),
    "sd3.5-medium batch 2": TinyCase(lambda: build_sd3(second_attention=(0, 1)), lambda: sd3_call(batch=2)),
    "sd3.5-medium short text, control": TinyCase(
        lambda: build_sd3(second_attention=(0, 1)),
        lambda: sd3_call(text=2, control={"output": residuals(3, 35, width=192)}),
    ),
}

_GLYPHS_AND_PICTURE: Inputs = {"txt_byt5": noise(2, 6, 1472), "clip_fea": noise(2, 7, 20)}

HUNYUAN_CASES = {
    "hunyuan-1.5": TinyCase(build_hunyuan, lambda: hunyuan_call(batch=2, **_GLYPHS_AND_PICTURE)),
    # The class takes one mask for all samples only.
    "hunyuan-1.5 text mask": TinyCase(
        build_hunyuan,
        lambda: hunyuan_call(
            batch=2, attention_mask=torch.tensor([[1] * 7 + [0] * 4]), control={"input": residuals(2, 60)}
        ),
    ),
    # One frame is modulated as another timestep.
    "hunyuan-1.5 guiding frame": TinyCase(
        build_hunyuan, lambda: hunyuan_call(guiding_frame_index=torch.zeros(1))
    ),
    "hunyuan-1.0 short text": TinyCase(
        lambda: build_hunyuan(
            depth_single_blocks=2, byt5=False, use_cond_type_embedding=False, vision_in_dim=None
        ),
        lambda: hunyuan_call(text=2, control={"input": residuals(2, 60), "output": residuals(2, 60, seed=7)}),
    ),
}

# A mask over frames gives each frame a timestep of its own; a mask over pixels, each token.
_FRAME_TIMES = torch.tensor([0.0, 0.5, 0.7]).repeat_interleave(20)[None]
_TOKEN_TIMES = 0.7 * (noise(1, 60) > 0)
_TEXT_MASK = torch.tensor([[1] * 7 + [0] * 4])
# The last frame is a guide at another time; a tenth of its tokens is dropped.
_GUIDE: Inputs = {"keyframe_idxs": 8.0 * noise(1, 3, 20, 2).abs(), "denoise_mask": torch.ones(1, 1, 3, 5, 4)}
_GUIDE["denoise_mask"][0, 0, 2, 0, :2] = -1.0

LTX_CASES = {
    "ltxv, text mask, batch 2": TinyCase(
        build_ltxv, lambda: ltxv_call(batch=2, attention_mask=_TEXT_MASK.repeat(2, 1))
    ),
    "ltxv token times": TinyCase(build_ltxv, lambda: ltxv_call(timestep=_TOKEN_TIMES)),
    "ltxv guide": TinyCase(build_ltxv, lambda: ltxv_call(timestep=_TOKEN_TIMES, **_GUIDE), newer_only=True),
    "ltx2": TinyCase(build_ltxav, ltxav_call, newer_only=True),
    "ltx2 frame times, batch 2": TinyCase(
        lambda: build_ltxav(cross_attention_adaln=True),
        lambda: ltxav_call(batch=2, timestep=_FRAME_TIMES.repeat(2, 1)),
        newer_only=True,
    ),
    "ltx2 token times, perturbed attention": TinyCase(
        build_ltxav,
        lambda: ltxav_call(
            timestep=_TOKEN_TIMES,
            denoise_mask=_TOKEN_TIMES.reshape(1, 1, 3, 5, 4) / 0.7,
            transformer_options={"stg_self_attn_blocks": (1,)},
        ),
        newer_only=True,
    ),
    "ltx2 video alone": TinyCase(build_ltxav, lambda: ltxav_call(x=[noise(1, 8, 3, 5, 4)]), newer_only=True),
}


def _unet_control() -> Inputs:
    """Residuals of all three lists; the model takes them from the ends."""
    return {
        "middle": [noise(1, 96, 3, 4)], "input": [None, noise(1, 64, 5, 7)],
        "output": [None, None, noise(1, 64, 5, 7), noise(1, 96, 3, 4)],
    }  # fmt: skip


SDXL_CASES = {
    "sdxl": TinyCase(build_sdxl, sdxl_call),
    "sdxl batch 2": TinyCase(build_sdxl, lambda: sdxl_call(batch=2, x=noise(2, 4, 8, 8))),
    "sdxl control": TinyCase(build_sdxl, lambda: sdxl_call(control=_unet_control())),
}

CASES: dict[str, TinyCase] = (
    FLUX_CASES | QWEN_CASES | WAN_CASES | Z_IMAGE_CASES | SD3_CASES | HUNYUAN_CASES | LTX_CASES | SDXL_CASES
)
