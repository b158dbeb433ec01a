"""A custom node of the tests' server: its loaders give tiny models for the files of tiny_workflow_files.py.

Diffusion models are loaded by ComfyUI and by us as always; only their detection, which knows the sizes of
the published models, is told by the file's header. Text encoders, VAEs and image encoders
are stubs, but for the demo's own.
"""

from __future__ import annotations

import importlib
import json
import sys
import types
from pathlib import Path
from typing import Any

import comfy.model_detection
import comfy.sd
import comfy.supported_models
import comfy.utils
import folder_paths
import torch
from comfy_api.latest import io

import nodes

_PACKAGE = "ferry_tiny_support"


def _support(name: str) -> types.ModuleType:
    """Import a module of this folder, whose modules import one another."""
    folder = Path(__file__).resolve().parent
    if _PACKAGE not in sys.modules:
        package = types.ModuleType(_PACKAGE)
        package.__path__ = [str(folder)]
        sys.modules[_PACKAGE] = package
    return importlib.import_module(f"{_PACKAGE}.{name}")


tiny, sizes = _support("tiny_clip_vae"), _support("tiny_sizes")
# A picture that a node brings to a megapixel is brought to the second size instead; smaller ones stay.
_LARGE_PX, _LARGEST_PX = 512, 96
_upscale = comfy.utils.common_upscale
_detect = comfy.model_detection.model_config_from_unet


def _detect_tiny(state_dict: Any, prefix: str, *arguments: Any, **options: Any) -> Any:
    header = (options.get("metadata") or {}).get("ferry_tiny")
    if header is None:
        return _detect(state_dict, prefix, *arguments, **options)
    found = json.loads(header)
    return getattr(comfy.supported_models, found["kind"])(found["config"])


def _clip(**more: Any) -> Any:
    return tiny.tiny_clip(width=sizes.TEXT_WIDTH, pooled=sizes.POOLED_WIDTH, more=more)


def _vae(name: str) -> Any:
    channels, patch, stride = sizes.VAES[name]
    return tiny.tiny_vae(channels=channels, is_video=stride > 0, patch=patch, stride=stride or 1)


def _model(name: str) -> Any:
    return comfy.sd.load_diffusion_model(folder_paths.get_full_path_or_raise("checkpoints", name))


class _Vision:
    """Embeddings of the shape that the models expect."""

    def encode_image(self, image: torch.Tensor, crop: bool = True) -> Any:
        states = torch.ones(len(image), 257, sizes.POOLED_WIDTH)
        return types.SimpleNamespace(penultimate_hidden_states=states, last_hidden_state=states[:, :7])


class _Sound:
    """LTX-2's audio VAE, as its nodes use it."""

    latent_channels = 8
    first_stage_model = types.SimpleNamespace(
        latent_frequency_bins=16,
        num_of_latents_from_frames=lambda frames, rate: max(1, int(frames / rate * 25)),
        output_sample_rate=24000,
    )

    def decode(self, latent: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(latent), latent.shape[2] * 960, 2)


def _replace(kind: str, result: Any, known: Any = lambda **_: True) -> None:
    """Let a loader, of either kind of node, return ``result(**inputs)`` for the files that are ours."""
    node = nodes.NODE_CLASS_MAPPINGS.get(kind)
    if node is None:
        return
    if hasattr(node, "define_schema"):
        node.execute = classmethod(lambda cls, **inputs: io.NodeOutput(*result(**inputs)))
        return
    load = getattr(node, node.FUNCTION)

    def replaced(self: Any, **inputs: Any) -> Any:
        return result(**inputs) if known(**inputs) else load(self, **inputs)

    setattr(node, node.FUNCTION, replaced)


def _small_upscale(samples: Any, width: int, height: int, *arguments: Any, **options: Any) -> Any:
    """Nodes that bring a picture to a megapixel bring it to `_LARGEST_PX`, in the same shape."""
    if max(width, height) > _LARGE_PX:
        shrink = max(width, height) / _LARGEST_PX
        width, height = (max(32, round(side / shrink / 32) * 32) for side in (width, height))
    return _upscale(samples, width, height, *arguments, **options)


comfy.model_detection.model_config_from_unet = _detect_tiny
comfy.utils.common_upscale = _small_upscale
_replace(
    "CLIPLoader",
    lambda type, **_: (_clip(attention_mask=type == "ltxv"),),
    lambda clip_name, **_: clip_name != _support("tiny_text_encoder").NAME,
)
_replace("DualCLIPLoader", lambda **_: (_clip(),))
_replace("LTXAVTextEncoderLoader", lambda **_: (_clip(unprocessed_ltxav_embeds=True),))
_replace("VAELoader", lambda vae_name: (_vae(vae_name),), lambda vae_name: vae_name in sizes.VAES)
_replace("LTXVAudioVAELoader", lambda ckpt_name: (_Sound(),))
_replace("CLIPVisionLoader", lambda clip_name: (_Vision(),))
_replace("CheckpointLoaderSimple", lambda ckpt_name: (_model(ckpt_name), _clip(), _vae(ckpt_name)))

NODE_CLASS_MAPPINGS: dict[str, Any] = {}
