"""Tiny models of diffusers' own classes, which bring dictionaries of how they are split, and their calls."""

from __future__ import annotations

import torch
from torch import nn

from .tiny_models import Inputs, noise


def flux() -> tuple[nn.Module, Inputs]:
    """Splits the inputs of the whole model, positions among them; fewer text tokens than ranks, residuals."""
    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel(
        in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=3,
        joint_attention_dim=20, pooled_projection_dim=12, axes_dims_rope=(4, 6, 6), guidance_embeds=True,
    )  # fmt: skip
    inputs = {
        "hidden_states": noise(2, 35, 4), "encoder_hidden_states": noise(2, 2, 20),
        "pooled_projections": noise(2, 12), "timestep": torch.tensor([0.7, 0.3]),
        "guidance": torch.tensor([3.5, 3.5]), "img_ids": torch.arange(105.0).view(35, 3) % 7,
        "txt_ids": torch.zeros(2, 3), "controlnet_block_samples": [noise(2, 35, 48)],
        "controlnet_single_block_samples": (noise(2, 35, 48, seed=1),),
    }  # fmt: skip
    return model, inputs


def wan() -> tuple[nn.Module, Inputs]:
    """Splits tokens in the first block and what the position layer gives; keys of the text are whole."""
    from diffusers import WanTransformer3DModel

    model = WanTransformer3DModel(
        num_attention_heads=3, attention_head_dim=16, in_channels=4, out_channels=4, text_dim=20,
        freq_dim=16, ffn_dim=40, num_layers=2, cross_attn_norm=True,
    )  # fmt: skip
    inputs = {
        "hidden_states": noise(1, 4, 3, 10, 6), "timestep": torch.tensor([700]),
        "encoder_hidden_states": noise(1, 11, 20),
    }  # fmt: skip
    return model, inputs


def ltx() -> tuple[nn.Module, Inputs]:
    """Splits the text too, and a mask of its keys, which video tokens attend to."""
    from diffusers import LTXVideoTransformer3DModel

    model = LTXVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=3, attention_head_dim=16, cross_attention_dim=48,
        num_layers=2, caption_channels=20,
    )  # fmt: skip
    inputs = {
        "hidden_states": noise(2, 30, 4), "encoder_hidden_states": noise(2, 2, 20),
        "timestep": torch.tensor([700, 300]), "num_frames": 3, "height": 5, "width": 2,
        "encoder_attention_mask": torch.tensor([[1, 0], [1, 1]]),
    }  # fmt: skip
    return model, inputs


def qwen() -> tuple[nn.Module, Inputs]:
    """Has layers for text and image apart."""
    from diffusers import QwenImageTransformer2DModel

    model = QwenImageTransformer2DModel(
        patch_size=2, in_channels=16, out_channels=4, num_layers=2, attention_head_dim=16,
        num_attention_heads=3, joint_attention_dim=20, axes_dims_rope=(4, 6, 6),
    )  # fmt: skip
    inputs = {
        "hidden_states": noise(1, 35, 16), "encoder_hidden_states": noise(1, 1, 20),
        "timestep": torch.tensor([0.7]), "img_shapes": [[(1, 5, 7)]],
        "controlnet_block_samples": [noise(1, 35, 48)],
    }  # fmt: skip
    return model, inputs


def qwen21() -> tuple[nn.Module, Inputs]:
    """One stream of text and picture with a gated feed-forward; has a dictionary of weights only."""
    from diffusers import QwenImage21Transformer2DModel

    model = QwenImage21Transformer2DModel(
        in_channels=4, out_channels=4, num_layers=2, attention_head_dim=16, num_attention_heads=3,
        context_in_dim=20, axes_dims_rope=(4, 6, 6),
    )  # fmt: skip
    inputs = {
        "hidden_states": noise(1, 24, 4), "encoder_hidden_states": noise(1, 7, 20),
        "timestep": torch.tensor([0.7]), "img_shapes": [[(1, 4, 6)]],
        "img_mask": torch.tensor([[False] * 7 + [True] * 6]),  # each for four latent tokens
    }  # fmt: skip
    return model, inputs


def flux2() -> tuple[nn.Module, Inputs]:
    """Fuses query, key, value and a gated feed-forward in one layer, and cuts its output by proportion."""
    from diffusers import Flux2Transformer2DModel

    model = Flux2Transformer2DModel(
        in_channels=8, num_layers=1, num_single_layers=2, attention_head_dim=16, num_attention_heads=3,
        joint_attention_dim=20, timestep_guidance_channels=16, axes_dims_rope=(4, 4, 4, 4),
    )  # fmt: skip
    inputs = {
        "hidden_states": noise(2, 13, 8), "encoder_hidden_states": noise(2, 2, 20),
        "timestep": torch.tensor([0.7, 0.3]), "guidance": torch.tensor([3.5, 2.0]),
        "img_ids": torch.arange(52.0).view(1, 13, 4).repeat(2, 1, 1) % 5, "txt_ids": torch.zeros(2, 2, 4),
    }  # fmt: skip
    return model, inputs


def ltx2() -> tuple[nn.Module, Inputs]:
    """Has audio beside the video; only the video's tokens are split.

    Its dictionary leaves out the video's positions in attention between the two. Audio and video are of one
    length here, which tells nothing apart.
    """
    from diffusers import LTX2VideoTransformer3DModel

    model = LTX2VideoTransformer3DModel(
        in_channels=8, out_channels=8, num_attention_heads=3, attention_head_dim=16, cross_attention_dim=48,
        audio_in_channels=8, audio_out_channels=8, audio_num_attention_heads=3, audio_attention_head_dim=8,
        audio_cross_attention_dim=24, num_layers=2, caption_channels=20,
    )  # fmt: skip
    inputs = {
        "hidden_states": noise(1, 30, 8), "audio_hidden_states": noise(1, 30, 8),
        "encoder_hidden_states": noise(1, 11, 20), "audio_encoder_hidden_states": noise(1, 11, 20),
        "timestep": torch.tensor([700]), "num_frames": 3, "height": 5, "width": 2,
        "audio_num_frames": 30, "encoder_attention_mask": torch.tensor([[1] * 7 + [0] * 4]),
        "audio_encoder_attention_mask": torch.tensor([[1] * 7 + [0] * 4]),
    }  # fmt: skip
    return model, inputs


def chronoedit() -> tuple[nn.Module, Inputs]:
    """Wan's split, with a picture's keys beside the text's; the last frame has a position far away."""
    from diffusers import ChronoEditTransformer3DModel

    model = ChronoEditTransformer3DModel(
        num_attention_heads=3, attention_head_dim=16, in_channels=4, out_channels=4, text_dim=20, freq_dim=16,
        ffn_dim=40, num_layers=2, image_dim=12, added_kv_proj_dim=48,
    )  # fmt: skip
    inputs = {
        "hidden_states": noise(1, 4, 2, 10, 6), "timestep": torch.tensor([700]),
        "encoder_hidden_states": noise(1, 11, 20), "encoder_hidden_states_image": noise(1, 5, 12),
    }  # fmt: skip
    return model, inputs


def helios(*, is_amplify_history: bool = False) -> tuple[nn.Module, Inputs]:
    """Splits and gathers inside each block, around every attention and feed-forward.

    Its dictionary names the gathers of 40 blocks, of which there are two here.
    """
    from diffusers import HeliosTransformer3DModel

    model = HeliosTransformer3DModel(
        num_attention_heads=3, attention_head_dim=16, in_channels=4, out_channels=4, text_dim=20, freq_dim=16,
        ffn_dim=40, num_layers=2, rope_dim=(4, 6, 6),
        is_amplify_history=is_amplify_history,
    )  # fmt: skip
    inputs = {
        "hidden_states": noise(1, 4, 3, 10, 6), "timestep": torch.tensor([700]),
        "encoder_hidden_states": noise(1, 11, 20), "indices_hidden_states": torch.arange(2, 5)[None],
        "indices_latents_history_short": torch.arange(2)[None],
        "latents_history_short": noise(1, 4, 2, 10, 6),
    }  # fmt: skip
    return model, inputs


def minimax_h3() -> tuple[nn.Module, Inputs]:
    """Packs text, video and audio in one sequence and splits the rows' indices with it; two outputs."""
    from diffusers import MiniMaxH3Transformer3DModel

    model = MiniMaxH3Transformer3DModel(
        num_attention_heads=3, attention_head_dim=16, hidden_size=48, num_layers=2, num_refiner_layers=1,
        ffn_dim=40, in_channels=2, audio_in_channels=6, text_dim=20, freq_dim=16, time_embed_hidden_dim=20,
        time_embed_dim=24, rope_freq_dim=2,
    )  # fmt: skip
    inputs = {
        "hidden_states": noise(1, 13, 8), "audio_hidden_states": noise(1, 4, 6),
        "encoder_hidden_states": noise(1, 6, 20), "timestep": torch.tensor([0.7, 0.3]),
        "timestep_indices": torch.arange(23) % 2, "token_tags": torch.tensor([1] * 6 + [0] * 13 + [2] * 4),
        "position_ids": torch.arange(69).view(23, 3) % 7, "text_indices": torch.arange(6),
        "video_indices": torch.arange(6, 19), "audio_indices": torch.arange(19, 23),
    }  # fmt: skip
    return model, inputs
