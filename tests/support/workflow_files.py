"""Files that people download for the workflows, and those that several models share."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class ModelFile:
    """A file that people download.

    Args:
        repository: ``owner/name`` on Hugging Face.
        path: Inside it.
        folder: Below ComfyUI's ``models``; by default the file's own folder there.
    """

    repository: str
    path: str
    folder: str = ""

    @property
    def name(self) -> str:
        """What the loader's list shows."""
        return self.path.rsplit("/", 1)[-1]

    @property
    def is_quantized(self) -> bool:
        """Whether its diffusion model is kept in a format that ComfyUI 0.3.75 cannot hand to workers."""
        return re.search(r"fp8(_e4m3fn)?_scaled|fp8mixed|-fp8\.", self.name) is not None

    @property
    def directory(self) -> str:
        """The folder below ``models``."""
        return self.folder or self.path.split("/")[-2]

    @property
    def url(self) -> str:
        """Where it is downloaded from."""
        return f"https://huggingface.co/{self.repository}/resolve/main/{self.path}"


SPLIT = "split_files"
QWEN_REPO, EDIT_REPO = "Comfy-Org/Qwen-Image_ComfyUI", "Comfy-Org/Qwen-Image-Edit_ComfyUI"
WAN21_REPO, WAN22_REPO = "Comfy-Org/Wan_2.1_ComfyUI_repackaged", "Comfy-Org/Wan_2.2_ComfyUI_Repackaged"
HUNYUAN_REPO = "Comfy-Org/HunyuanVideo_1.5_repackaged"
FLUX2_REPO, KLEIN_REPO = "Comfy-Org/flux2-dev", "Comfy-Org/flux2-klein"


def diffusion(repository: str, name: str) -> ModelFile:
    """Return a diffusion model of a repository laid out by ComfyUI's people."""
    return ModelFile(repository, f"{SPLIT}/diffusion_models/{name}")


QWEN_VL = ModelFile(QWEN_REPO, f"{SPLIT}/text_encoders/qwen_2.5_vl_7b_fp8_scaled.safetensors")
QWEN_VAE = ModelFile(QWEN_REPO, f"{SPLIT}/vae/qwen_image_vae.safetensors")
QWEN_3 = ModelFile("Comfy-Org/z_image_turbo", f"{SPLIT}/text_encoders/qwen_3_4b.safetensors")
FLUX_VAE = ModelFile("Comfy-Org/Lumina_Image_2.0_Repackaged", f"{SPLIT}/vae/ae.safetensors")
FLUX2_VAE = ModelFile(FLUX2_REPO, f"{SPLIT}/vae/flux2-vae.safetensors")
MISTRAL = ModelFile(FLUX2_REPO, f"{SPLIT}/text_encoders/mistral_3_small_flux2_fp8.safetensors")
CLIP_L = ModelFile("comfyanonymous/flux_text_encoders", "clip_l.safetensors", "text_encoders")
T5 = ModelFile("comfyanonymous/flux_text_encoders", "t5xxl_fp8_e4m3fn_scaled.safetensors", "text_encoders")
UMT5 = ModelFile(WAN21_REPO, f"{SPLIT}/text_encoders/umt5_xxl_fp8_e4m3fn_scaled.safetensors")
WAN21_VAE = ModelFile(WAN22_REPO, f"{SPLIT}/vae/wan_2.1_vae.safetensors")
WAN22_VAE = ModelFile(WAN22_REPO, f"{SPLIT}/vae/wan2.2_vae.safetensors")
SIGCLIP = ModelFile("Comfy-Org/sigclip_vision_384", "sigclip_vision_patch14_384.safetensors", "clip_vision")
BYT5 = ModelFile(HUNYUAN_REPO, f"{SPLIT}/text_encoders/byt5_small_glyphxl_fp16.safetensors")
GEMMA_3 = ModelFile("Comfy-Org/ltx-2", f"{SPLIT}/text_encoders/gemma_3_12B_it_fp4_mixed.safetensors")
