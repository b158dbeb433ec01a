"""Tiny random models under the file names that the shipped workflows ask for.

The diffusion models are of ComfyUI's own classes; a note in each file's header says which and with what
configuration, and ``tiny_loader_node.py`` makes ComfyUI's loaders believe it. Encoders and VAEs are stubs of
the right shapes. All take text embeddings of one width, so that one tiny text encoder serves them.
"""

from __future__ import annotations

import inspect
import json
import shutil
from pathlib import Path
from typing import Any

import numpy
import torch
from safetensors.torch import save_file

from .tiny_models import is_newer_comfyui
from .tiny_patchers import build_patcher
from .tiny_sizes import POOLED_WIDTH, TEXT_WIDTH
from .workflow_models import MODELS, WorkflowModel

Config = dict[str, Any]
_HEADER = "ferry_tiny"

_FLUX: Config = {
    "image_model": "flux", "in_channels": 16, "out_channels": 16, "vec_in_dim": POOLED_WIDTH,
    "context_in_dim": TEXT_WIDTH, "hidden_size": 48, "mlp_ratio": 4.0, "num_heads": 3, "depth": 2,
    "depth_single_blocks": 2, "axes_dim": [4, 6, 6], "theta": 10000, "patch_size": 2, "qkv_bias": True,
    "guidance_embed": True, "txt_ids_dims": [],
}  # fmt: skip
_NO_VEC: Config = {"vec_in_dim": None, "guidance_embed": False, "txt_ids_dims": [1, 2]}
_FLUX2 = _FLUX | {
    "image_model": "flux2", "in_channels": 128, "out_channels": 128, "vec_in_dim": None, "mlp_ratio": 3.0,
    "axes_dim": [4] * 4, "theta": 2000, "patch_size": 1, "qkv_bias": False, "txt_ids_dims": [3],
    "ops_bias": False, "global_modulation": True, "mlp_silu_act": True, "default_ref_method": "index",
    "ref_index_scale": 10.0,
}  # fmt: skip
_QWEN: Config = {
    "image_model": "qwen_image", "patch_size": 2, "in_channels": 64, "out_channels": 16, "num_layers": 2,
    "attention_head_dim": 16, "num_attention_heads": 3, "joint_attention_dim": TEXT_WIDTH,
    "axes_dims_rope": [4, 6, 6],
}  # fmt: skip
_Z_IMAGE: Config = {
    "image_model": "lumina2", "patch_size": 2, "in_channels": 16, "dim": 280, "n_layers": 2,
    "n_refiner_layers": 2, "n_heads": 5, "n_kv_heads": 5, "qk_norm": True, "cap_feat_dim": TEXT_WIDTH,
    "axes_dims": [8, 24, 24], "axes_lens": [64] * 3, "rope_theta": 256.0, "ffn_dim_multiplier": 8 / 3,
    "z_image_modulation": True, "time_scale": 1000.0, "pad_tokens_multiple": 8,
}  # fmt: skip
_LUMINA = _Z_IMAGE | {
    "dim": 288, "n_heads": 6, "n_kv_heads": 2, "axes_dims": [16] * 3, "rope_theta": 10000.0,
    "z_image_modulation": False, "time_scale": 1.0, "pad_tokens_multiple": None,
}  # fmt: skip
_SD3: Config = {
    "in_channels": 16, "patch_size": 2, "out_channels": 16, "depth": 2, "input_size": None,
    "adm_in_channels": POOLED_WIDTH, "num_patches": 256, "pos_embed_max_size": 16, "qk_norm": "rms",
    "pos_embed_scaling_factor": None, "x_block_self_attn_layers": [], "context_embedder_config": {
        "target": "torch.nn.Linear", "params": {"in_features": TEXT_WIDTH, "out_features": 128},
    },
}  # fmt: skip
_WAN: Config = {
    "image_model": "wan2.1", "model_type": "t2v", "dim": 48, "in_dim": 16, "out_dim": 16, "num_heads": 3,
    "ffn_dim": 72, "num_layers": 2, "patch_size": [1, 2, 2], "freq_dim": 16, "text_dim": TEXT_WIDTH,
}  # fmt: skip
_HUNYUAN: Config = {
    "image_model": "hunyuan_video", "in_channels": 65, "out_channels": 32, "patch_size": [1, 1, 1],
    "vec_in_dim": None, "axes_dim": [4, 6, 6], "context_in_dim": TEXT_WIDTH, "hidden_size": 48,
    "mlp_ratio": 4.0, "num_heads": 3, "depth": 2, "depth_single_blocks": 0, "theta": 256, "qkv_bias": True,
    "guidance_embed": False, "byt5": True, "meanflow": False, "use_cond_type_embedding": True,
    "vision_in_dim": POOLED_WIDTH, "meanflow_sum": True,
}  # fmt: skip
_LTXV: Config = {
    "image_model": "ltxv", "in_channels": 128, "cross_attention_dim": 48, "attention_head_dim": 16,
    "num_attention_heads": 3, "caption_channels": TEXT_WIDTH, "num_layers": 2,
}  # fmt: skip
_LTX2: Config = {
    "image_model": "ltxav", "in_channels": 128, "audio_in_channels": 128, "cross_attention_dim": 48,
    "audio_cross_attention_dim": 24, "attention_head_dim": 16, "audio_attention_head_dim": 8,
    "num_attention_heads": 3, "audio_num_attention_heads": 3, "caption_channels": TEXT_WIDTH,
    "num_layers": 2, "rope_type": "split", "apply_gated_attention": True,
    "connector_num_attention_heads": 2, "connector_attention_head_dim": 20,
    "audio_connector_num_attention_heads": 2, "audio_connector_attention_head_dim": 20,
    "connector_num_layers": 1,
}  # fmt: skip
_SDXL: Config = {
    "use_checkpoint": False, "image_size": 32, "out_channels": 4, "use_spatial_transformer": True,
    "legacy": False, "num_classes": "sequential", "adm_in_channels": 2816, "in_channels": 4,
    "model_channels": 64, "num_res_blocks": [1, 1], "transformer_depth": [1, 1], "channel_mult": [1, 2],
    "transformer_depth_middle": 1, "use_linear_in_transformer": True, "context_dim": TEXT_WIDTH,
    "num_head_channels": 64, "transformer_depth_output": [1, 1, 1, 1], "use_temporal_attention": False,
}  # fmt: skip
_WAN_I2V, _WAN_5B = _WAN | {"in_dim": 36}, _WAN | {"in_dim": 48, "out_dim": 48}

# WorkflowModel.key -> class in comfy.supported_models, and its configuration.
TINY: dict[str, tuple[str, Config]] = {
    "longcat_image": ("LongCatImage", _FLUX | _NO_VEC),
    "longcat_image_edit": ("LongCatImage", _FLUX | _NO_VEC),
    "ovis_image": ("Flux", _FLUX | _NO_VEC | {"yak_mlp": True, "txt_norm": True}),
    "qwen_image": ("QwenImage", _QWEN),
    "qwen_image_edit": ("QwenImage", _QWEN),
    "qwen_image_edit_2509": ("QwenImage", _QWEN),
    "qwen_image_edit_2511": ("QwenImage", _QWEN | {"default_ref_method": "index_timestep_zero"}),
    "qwen_image_layered": (
        "QwenImage", _QWEN | {"default_ref_method": "negative_index", "use_additional_t_cond": True}
    ),
    "z_image": ("ZImage", _Z_IMAGE),
    "z_image_turbo": ("ZImage", _Z_IMAGE),
    "sd35_large": ("SD3", _SD3),
    "sd35_medium": ("SD3", _SD3 | {"x_block_self_attn_layers": [0]}),
    "flux2_klein": ("Flux2", _FLUX2 | {"guidance_embed": False}),
    "flux2_klein_edit": ("Flux2", _FLUX2 | {"guidance_embed": False}),
    "flux2_dev": ("Flux2", _FLUX2),
    "flux2_dev_edit": ("Flux2", _FLUX2),
    "flux1_dev": ("Flux", _FLUX),
    "flux1_kontext": ("Flux", _FLUX),
    "wan22_t2v": ("WAN21_T2V", _WAN),
    "wan22_i2v": ("WAN21_T2V", _WAN_I2V),
    "wan22_5b": ("WAN22_T2V", _WAN_5B),
    "wan21_i2v": ("WAN21_I2V", _WAN_I2V | {"model_type": "i2v"}),
    "hunyuan_video_15": ("HunyuanVideo15", _HUNYUAN),
    "hunyuan_video_15_i2v": ("HunyuanVideo15", _HUNYUAN),
    "ltx_video": ("LTXV", _LTXV),
    "ltx_video_i2v": ("LTXV", _LTXV),
    "ltx2": ("LTXAV", _LTX2),
    "sdxl": ("SDXL", _SDXL),
    "lumina2": ("Lumina2", _LUMINA),
}  # fmt: skip


def write_files(models: Path, wanted: tuple[WorkflowModel, ...] = MODELS) -> None:
    """Write every file of these workflows below the folder ``models`` of a ComfyUI.

    Needs ComfyUI in this process; for models that it lacks, empty files are written.
    """
    newer = is_newer_comfyui()

    for model in wanted:
        kind, config = TINY[model.key]
        for file in model.files:
            path = models / file.directory / file.name
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists():
                continue
            if file in model.models and (newer or not model.newer_only):
                _write_model(path, kind, config)
            else:
                save_file({"nothing": torch.zeros(1)}, path)


def _known(config: Config) -> Config:
    """Return the configuration with what this ComfyUI's Flux classes know; 0.3.75 lacks a few values."""
    import comfy.ldm.flux.model
    import comfy.ldm.hunyuan_video.model

    classes = {
        "flux": comfy.ldm.flux.model.FluxParams,
        "flux2": comfy.ldm.flux.model.FluxParams,
        "hunyuan_video": comfy.ldm.hunyuan_video.model.HunyuanVideoParams,
    }
    parameters = classes.get(config.get("image_model", ""))
    if parameters is None:
        return config
    names = {"image_model", *inspect.signature(parameters).parameters}
    return {name: value for name, value in config.items() if name in names}


def _write_model(path: Path, kind: str, config: Config) -> None:
    config = _known(config)
    network = build_patcher(kind, json.loads(json.dumps(config))).model.diffusion_model
    tensors = {name: tensor.clone().contiguous() for name, tensor in network.state_dict().items()}
    save_file(tensors, path, {_HEADER: json.dumps({"kind": kind, "config": config})})


def write_pictures(base: Path, comfyui: Path) -> None:
    """Put what the workflows read into the folder ``input``: a picture, and training sets of three."""
    root, example = base / "input", comfyui / "input" / "example.png"
    for name in ("my_pictures", "my_originals", "my_videos"):
        (root / name).mkdir(parents=True, exist_ok=True)
    shutil.copyfile(example, root / "example.png")
    for number in range(3):
        for name in ("my_pictures", "my_originals"):
            shutil.copyfile(example, root / name / f"{number}.png")
        for name in ("my_pictures", "my_videos"):
            (root / name / f"{number}.txt").write_text(f"example {number}", encoding="utf-8")
        _write_video(root / "my_videos" / f"{number}.mp4")


def _write_video(path: Path) -> None:
    """Write a second of a square that moves."""
    import av

    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=16)
        stream.width, stream.height, stream.pix_fmt = 64, 64, "yuv420p"
        for place in range(0, 64, 4):
            pixels = numpy.zeros((64, 64, 3), dtype=numpy.uint8)
            pixels[:, place : place + 8] = 255
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels)))
        container.mux(stream.encode())
