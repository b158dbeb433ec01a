"""Tiny, random models of ComfyUI's own classes, and plain calls of them.

Three heads, so that head shards are uneven on two ranks and empty on four; odd token counts, so that
sequences never divide. Weights are scaled by fan-in: with plain small ones attention would hardly
change the output, and a broken exchange would go unseen.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

Inputs = dict[str, Any]


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    """Return standard normal values, the same for the same shape and seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def build_flux(*, flux2: bool = False, **changes: Any) -> nn.Module:
    """Return a Flux; FLUX.1-dev by default, FLUX.2-klein with ``flux2``."""
    from comfy.ldm.flux.model import Flux, FluxParams

    flux1: Inputs = {
        "in_channels": 4, "out_channels": 4, "vec_in_dim": 24, "context_in_dim": 40, "mlp_ratio": 4.0,
        "depth_single_blocks": 2, "axes_dim": [4, 6, 6], "theta": 10000, "patch_size": 2, "qkv_bias": True,
        "guidance_embed": True, "txt_ids_dims": [],
    }  # fmt: skip
    klein: Inputs = {
        "in_channels": 8, "out_channels": 8, "vec_in_dim": None, "context_in_dim": 60, "mlp_ratio": 3.0,
        "depth_single_blocks": 3, "axes_dim": [4] * 4, "theta": 2000, "patch_size": 1, "qkv_bias": False,
        "guidance_embed": False, "txt_ids_dims": [3], "ops_bias": False, "global_modulation": True,
        "mlp_silu_act": True, "default_ref_method": "index", "ref_index_scale": 10.0,
    }  # fmt: skip
    config = (klein if flux2 else flux1) | {"hidden_size": 48, "num_heads": 3, "depth": 2} | changes
    known = inspect.signature(FluxParams).parameters
    return finish(Flux, {name: value for name, value in config.items() if name in known})


def build_qwen(**changes: Any) -> nn.Module:
    """Return a Qwen-Image."""
    from comfy.ldm.qwen_image.model import QwenImageTransformer2DModel

    config = {
        "patch_size": 2, "in_channels": 16, "out_channels": 4, "num_layers": 2, "attention_head_dim": 16,
        "num_attention_heads": 3, "joint_attention_dim": 40, "axes_dims_rope": (4, 6, 6),
    }  # fmt: skip
    return finish(QwenImageTransformer2DModel, config | changes)


def build_wan(**changes: Any) -> nn.Module:
    """Return a Wan text-to-video."""
    from comfy.ldm.wan.model import WanModel

    config = {
        "model_type": "t2v", "dim": 48, "in_dim": 4, "out_dim": 4, "num_heads": 3, "ffn_dim": 72,
        "num_layers": 2, "patch_size": (1, 2, 2), "freq_dim": 16, "text_dim": 40,
    }  # fmt: skip
    return finish(WanModel, config | changes)


def build_z_image(**changes: Any) -> nn.Module:
    """Return a Z-Image, with five heads: narrower ones cannot take their own modulation."""
    from comfy.ldm.lumina.model import NextDiT

    config = {
        "patch_size": 2, "in_channels": 4, "dim": 280, "n_layers": 2, "n_refiner_layers": 2, "n_heads": 5,
        "n_kv_heads": 5, "qk_norm": True, "cap_feat_dim": 40, "axes_dims": [8, 24, 24],
        "axes_lens": [64] * 3, "rope_theta": 256.0, "ffn_dim_multiplier": 8 / 3, "z_image_modulation": True,
        "time_scale": 1000.0, "pad_tokens_multiple": 8,
    }  # fmt: skip
    return finish(NextDiT, config | changes)


def build_sd3(*, second_attention: tuple[int, ...] = ()) -> nn.Module:
    """Return a Stable Diffusion 3.5 large; medium, if blocks have a second attention."""
    from comfy.ldm.modules.diffusionmodules.mmdit import OpenAISignatureMMDITWrapper

    context = {"target": "torch.nn.Linear", "params": {"in_features": 40, "out_features": 192}}
    config = {
        "in_channels": 4, "patch_size": 2, "out_channels": 4, "depth": 3, "input_size": None,
        "adm_in_channels": 24, "context_embedder_config": context, "num_patches": 256,
        "pos_embed_max_size": 16, "qk_norm": "rms", "pos_embed_scaling_factor": None,
        "x_block_self_attn_layers": list(second_attention),
    }  # fmt: skip
    model = finish(OpenAISignatureMMDITWrapper, config)
    model.pos_embed.copy_(noise(*model.pos_embed.shape))  # comes from the checkpoint
    return model


def build_hunyuan(**changes: Any) -> nn.Module:
    """Return a HunyuanVideo 1.5."""
    from comfy.ldm.hunyuan_video.model import HunyuanVideo, HunyuanVideoParams

    config: Inputs = {
        "in_channels": 9, "out_channels": 4, "patch_size": [1, 1, 1], "vec_in_dim": None,
        "axes_dim": [4, 6, 6], "context_in_dim": 40, "hidden_size": 48, "mlp_ratio": 4.0, "num_heads": 3,
        "depth": 2, "depth_single_blocks": 0, "theta": 256, "qkv_bias": True, "guidance_embed": False,
        "byt5": True, "meanflow": False, "use_cond_type_embedding": True, "vision_in_dim": 20,
        "meanflow_sum": True,
    }  # fmt: skip
    known = inspect.signature(HunyuanVideoParams).parameters
    config = {name: value for name, value in config.items() if name in known}
    return finish(HunyuanVideo, config | changes)


def build_ltxv(**changes: Any) -> nn.Module:
    """Return an LTX-Video."""
    from comfy.ldm.lightricks.model import LTXVModel

    config: Inputs = {
        "in_channels": 8, "cross_attention_dim": 48, "attention_head_dim": 16, "num_attention_heads": 3,
        "caption_channels": 40, "num_layers": 2,
    }  # fmt: skip
    return finish(LTXVModel, config | changes)


LTX2: Inputs = {
    "audio_in_channels": 128, "cross_attention_dim": 48,
    "audio_cross_attention_dim": 24, "attention_head_dim": 16, "audio_attention_head_dim": 8,
    "num_attention_heads": 3, "audio_num_attention_heads": 3, "caption_channels": 40, "num_layers": 2,
    "rope_type": "split", "apply_gated_attention": True, "connector_num_attention_heads": 2,
    "connector_attention_head_dim": 20, "audio_connector_num_attention_heads": 2,
    "audio_connector_attention_head_dim": 20, "connector_num_layers": 1,
}  # fmt: skip


def build_ltxav(**changes: Any) -> nn.Module:
    """Return an LTX-2: video and audio."""
    from comfy.ldm.lightricks.av_model import LTXAVModel

    return finish(LTXAVModel, LTX2 | {"in_channels": 8} | changes)


def build_sdxl() -> nn.Module:
    """Return an SDXL UNet: attention at two of three levels, with two and three heads."""
    from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel

    config: Inputs = {
        "image_size": 32, "in_channels": 4, "out_channels": 4, "model_channels": 32,
        "num_res_blocks": [1] * 3, "channel_mult": (1, 2, 3), "num_head_channels": 32,
        "use_spatial_transformer": True, "transformer_depth": [0, 1, 2],
        "transformer_depth_output": [0, 0, 1, 1, 2, 2], "transformer_depth_middle": 2, "context_dim": 40,
        "use_linear_in_transformer": True, "adm_in_channels": 24, "num_classes": "sequential",
        "use_checkpoint": False, "legacy": False,
    }  # fmt: skip
    return finish(UNetModel, config)


def finish(cls: type[nn.Module], config: Inputs) -> nn.Module:
    """Return ``cls(**config)`` on the CPU in fp32 with random weights."""
    import comfy.ops

    operations = comfy.ops.disable_weight_init
    return randomize(cls(**config, dtype=torch.float32, device="cpu", operations=operations))


@torch.no_grad()
def randomize(model: nn.Module, gain: float = 1.4) -> nn.Module:
    """Fill every weight with fan-in scaled noise and return the model, frozen."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(False)
        values = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim == 0:
            continue
        if parameter.ndim == 1 and name.endswith(("weight", "scale")):
            parameter.copy_(1 + 0.2 * values)
        elif parameter.ndim == 1:
            parameter.copy_(0.3 * values)
        elif parameter.ndim == 3 or "table" in name:  # modulation tables
            parameter.copy_(0.7 * values)
        elif "pad_token" in name:
            parameter.copy_(0.7 * values)
        else:
            parameter.copy_(gain / parameter[0].numel() ** 0.5 * values)
    return model.eval()


def flux_call(*, text: int = 11, batch: int = 1, context: int = 40, **more: Any) -> Inputs:
    """Return a FLUX.1 call: 35 image tokens, padded up from an odd height."""
    inputs = {
        "x": noise(batch, 4, 13, 10), "timestep": torch.full((batch,), 0.7),
        "context": noise(batch, text, context),
        "y": noise(batch, 24), "guidance": torch.full((batch,), 3.5),
    }  # fmt: skip
    return inputs | more


def flux2_call(*, batch: int = 1, **more: Any) -> Inputs:
    """Return a FLUX.2 call: 35 image tokens."""
    inputs = {
        "x": noise(batch, 8, 7, 5),
        "timestep": torch.full((batch,), 0.7),
        "context": noise(batch, 11, 60),
    }
    return inputs | more


def qwen_call(*, text: int = 11, batch: int = 1, **more: Any) -> Inputs:
    """Return a Qwen-Image call: 35 image tokens."""
    inputs = {
        "x": noise(batch, 4, 1, 10, 14), "timesteps": torch.full((batch,), 0.7),
        "context": noise(batch, text, 40),
    }  # fmt: skip
    return inputs | more


def wan_call(*, channels: int = 4, batch: int = 1, **more: Any) -> Inputs:
    """Return a Wan call: 3 frames of 20 tokens, padded up from an odd width."""
    inputs = {
        "x": noise(batch, channels, 3, 10, 7), "timestep": torch.full((batch,), 700.0),
        "context": noise(batch, 11, 40),
    }  # fmt: skip
    return inputs | more


def z_image_call(*, text: int = 11, batch: int = 1, **more: Any) -> Inputs:
    """Return a Z-Image call: 35 image tokens, padded to 40; text padded to a multiple of 8."""
    inputs = {
        "x": noise(batch, 4, 10, 14), "timesteps": torch.full((batch,), 0.7),
        "context": noise(batch, text, 40), "num_tokens": text,
    }  # fmt: skip
    return inputs | more


def sd3_call(*, text: int = 11, batch: int = 1, **more: Any) -> Inputs:
    """Return a Stable Diffusion 3 call: 35 image tokens, padded up from an odd width."""
    inputs = {
        "x": noise(batch, 4, 10, 13), "timesteps": torch.full((batch,), 700.0),
        "context": noise(batch, text, 40), "y": noise(batch, 24),
    }  # fmt: skip
    return inputs | more


def hunyuan_call(*, text: int = 11, batch: int = 1, **more: Any) -> Inputs:
    """Return a HunyuanVideo call: 60 video tokens; glyph and picture embeddings join the text."""
    inputs = {
        "x": noise(batch, 9, 3, 5, 4), "timestep": torch.full((batch,), 700.0),
        "context": noise(batch, text, 40),
    }  # fmt: skip
    return inputs | more


def ltxv_call(*, text: int = 11, batch: int = 1, **more: Any) -> Inputs:
    """Return an LTX-Video call: 3 frames of 20 tokens."""
    inputs = {
        "x": noise(batch, 8, 3, 5, 4), "timestep": torch.full((batch, 1), 0.7),
        "context": noise(batch, text, 40), "attention_mask": None,
    }  # fmt: skip
    return inputs | more


def ltxav_call(*, text: int = 11, batch: int = 1, audio: int = 6, **more: Any) -> Inputs:
    """Return an LTX-2 call: 3 frames of 20 video tokens, and audio tokens."""
    inputs = {
        "x": [noise(batch, 8, 3, 5, 4), noise(batch, 8, audio, 16)],
        "timestep": torch.full((batch, 1), 0.7), "a_timestep": torch.full((batch, 1), 0.7),
        "context": noise(batch, text, 80), "attention_mask": None,
    }  # fmt: skip
    return inputs | more


def sdxl_call(*, text: int = 11, batch: int = 1, **more: Any) -> Inputs:
    """Return an SDXL call: 35 tokens at the second level, 12 at the third."""
    inputs = {
        "x": noise(batch, 4, 10, 13), "timesteps": torch.full((batch,), 700.0),
        "context": noise(batch, text, 40), "y": noise(batch, 24),
    }  # fmt: skip
    return inputs | more


def is_newer_comfyui() -> bool:
    """Return whether the ComfyUI under test has the classes that 0.3.75 lacks."""
    from comfy.ldm.flux.model import FluxParams

    return "txt_ids_dims" in inspect.signature(FluxParams).parameters
