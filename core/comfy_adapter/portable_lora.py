"""Names for a LoRA file that ComfyUI and diffusers both load.

ComfyUI's names for a family's layers are not always those of diffusers: Stable Diffusion 3 and Z-Image
have one packed layer where diffusers has three, and SDXL's blocks are counted in another way. ComfyUI's
loader knows diffusers' names for these and where the parts lie in a packed layer; that table is read
backwards here. FLUX.2 and LTX-Video keep their layers' names, but diffusers takes them only with PEFT's names
for the two matrices. The files of FLUX.1, Qwen-Image and Wan are taken by diffusers as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import comfy.model_base
import comfy.utils
import torch
from torch import Tensor

_PREFIX = "diffusion_model."
_DOWN, _UP, _ALPHA = "lora_down.weight", "lora_up.weight", "alpha"
_PEFT_NAMES = (comfy.model_base.Flux2, comfy.model_base.LTXV)


@dataclass(frozen=True)
class _Part:
    """One layer of diffusers.

    Attributes:
        name: Its path there.
        rows: Which rows of ComfyUI's layer it is, None for all.
    """

    name: str
    rows: tuple[int, int] | None = None


def portable_lora(model: Any, lora: Mapping[str, Tensor], *, algorithm: str) -> dict[str, Tensor]:
    """Return the tensors of a LoRA under names that ComfyUI and diffusers both know.

    Args:
        model: The MODEL (``ModelPatcher``) it was trained on.
        lora: Under ComfyUI's names, with the prefix ``diffusion_model.``.
        algorithm: diffusers knows ``"LoRA"``; files of the others stay as they are.
    """
    base = model.model
    if algorithm != "LoRA":
        return dict(lora)
    if isinstance(base, _PEFT_NAMES):
        return _without_alpha(lora)
    if isinstance(base, comfy.model_base.SDXL):
        return _renamed(lora, lambda path: [_Part(f"lora_unet_{path.replace('.', '_')}")])
    if isinstance(base, comfy.model_base.SD3):
        table = _parts(comfy.utils.mmdit_to_diffusers, base)
        named = _renamed(lora, lambda path: table.get(path, []), prefix="transformer.")
        return _without_alpha(named)
    if isinstance(base, comfy.model_base.Lumina2) and hasattr(comfy.utils, "z_image_to_diffusers"):
        table = _parts(comfy.utils.z_image_to_diffusers, base)
        return _renamed(lora, lambda path: table.get(path, []), prefix=_PREFIX)
    return dict(lora)


def _parts(table: Callable[..., dict[str, Any]], base: Any) -> dict[str, list[_Part]]:
    """Return diffusers' layers by the path of ComfyUI's."""
    parts: dict[str, list[_Part]] = {}
    for name, target in table(base.model_config.unet_config).items():
        if not name.endswith(".weight"):
            continue
        if isinstance(target, str):
            key, rows = target, None
        elif len(target) == 2:
            key, rows = target[0], target[1][1:]
        else:
            continue  # values in another order: not a LoRA of the same rank
        parts.setdefault(key.removesuffix(".weight"), []).append(_Part(name.removesuffix(".weight"), rows))
    return parts


def _renamed(
    lora: Mapping[str, Tensor], parts_of: Callable[[str], list[_Part]], *, prefix: str = ""
) -> dict[str, Tensor]:
    """Return the tensors under other names, packed layers in parts; a layer without a name keeps its own."""
    renamed: dict[str, Tensor] = {}
    for key, tensor in lora.items():
        path, suffix = _split(key)
        parts = parts_of(path) if suffix else []  # diffusers knows no additions to norms and biases
        if not parts:
            renamed[key] = tensor
        for part in parts:
            piece = tensor
            if suffix == _UP and part.rows is not None:
                start, count = part.rows
                piece = tensor[start : start + count]
            # A copy: safetensors refuses tensors that share memory.
            renamed[f"{prefix}{part.name}.{suffix}"] = piece.clone(memory_format=torch.contiguous_format)
    return renamed


def _split(key: str) -> tuple[str, str]:
    for suffix in (_DOWN, _UP, _ALPHA):
        if key.endswith(f".{suffix}"):
            return key.removeprefix(_PREFIX).removesuffix(f".{suffix}"), suffix
    return key.removeprefix(_PREFIX), ""


def _without_alpha(lora: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the LoRA under PEFT's names, which have no alpha: ``up`` holds it."""
    plain: dict[str, Tensor] = {}
    for key, tensor in lora.items():
        stem = key.removesuffix(_UP)
        if key.endswith(f".{_DOWN}"):
            plain[f"{key.removesuffix(_DOWN)}lora_A.weight"] = tensor
        elif key.endswith(f".{_UP}"):
            scale = float(lora[f"{stem}{_ALPHA}"]) / lora[f"{stem}{_DOWN}"].shape[0]
            plain[f"{stem}lora_B.weight"] = (tensor.float() * scale).to(tensor.dtype)
        elif not key.endswith(f".{_ALPHA}"):
            plain[key] = tensor  # of a norm or a bias, which diffusers does not know
    return plain
