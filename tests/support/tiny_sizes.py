"""Shapes that the tiny models of the workflows' tests and their stub encoders agree on."""

from __future__ import annotations

TEXT_WIDTH, POOLED_WIDTH = 40, 1280

# Name of a VAE or of a checkpoint with one -> latent channels, pixels a side, frames a latent (0: pictures).
VAES: dict[str, tuple[int, int, int]] = {
    "ae.safetensors": (16, 8, 0),
    "qwen_image_vae.safetensors": (16, 8, 4),
    "qwen_image_layered_vae.safetensors": (16, 8, 4),
    "flux2-vae.safetensors": (128, 16, 0),
    "wan_2.1_vae.safetensors": (16, 8, 4),
    "wan2.2_vae.safetensors": (48, 16, 4),
    "hunyuanvideo15_vae_fp16.safetensors": (32, 16, 4),
    "sd3.5_large_fp8_scaled.safetensors": (16, 8, 0),
    "sd3.5_medium_incl_clips_t5xxlfp8scaled.safetensors": (16, 8, 0),
    "ltx-video-2b-v0.9.5.safetensors": (128, 32, 8),
    "ltx-2-19b-dev-fp8.safetensors": (128, 32, 8),
    "sd_xl_base_1.0.safetensors": (4, 8, 0),
}
