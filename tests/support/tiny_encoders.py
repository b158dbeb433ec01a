"""Tiny text encoders of ComfyUI's own classes with random weights, and a call of each."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .tiny_models import Inputs, finish, noise, randomize

WORDS = torch.arange(14).view(2, 7) * 3 % 32
# The second prompt is padded.
WORDS_MASK = torch.tensor([[1] * 7, [1] * 4 + [0] * 3])
# Six query heads, two for each key head.
_LLAMA: Inputs = {
    "vocab_size": 32, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 6, "num_key_value_heads": 3,
}  # fmt: skip


def build_t5(**changes: Any) -> nn.Module:
    """Return a T5 with five heads."""
    from comfy.text_encoders.t5 import T5

    config: Inputs = {
        "num_layers": 2, "d_model": 40, "d_kv": 8, "num_heads": 5, "d_ff": 96, "vocab_size": 32,
        "dense_act_fn": "gelu_pytorch_tanh", "is_gated_act": True, "model_type": "t5",
    }  # fmt: skip
    return finish(T5, {"config_dict": config | changes})


def build_language_model(class_name: str, **changes: Any) -> nn.Module:
    """Return a Llama-like model with six query heads, two for each key head."""
    import comfy.text_encoders.llama

    return finish(getattr(comfy.text_encoders.llama, class_name), {"config_dict": _LLAMA | changes})


def build_qwen_vl() -> nn.Module:
    """Return a Qwen2.5-VL with a tiny vision tower; the class builds it in one size only."""
    import comfy.ops
    from comfy.text_encoders.llama import Qwen25_7BVLI
    from comfy.text_encoders.qwen_vl import Qwen2VLVisionTransformer

    tower = Qwen2VLVisionTransformer(
        hidden_size=32, output_hidden_size=48, intermediate_size=40, num_heads=4, num_layers=2,
        device="cpu", dtype=torch.float32, ops=comfy.ops.disable_weight_init,
    )  # fmt: skip
    operations = comfy.ops.disable_weight_init
    model = Qwen25_7BVLI(_LLAMA, dtype=torch.float32, device="meta", operations=operations)
    model.visual = tower
    model.model.to_empty(device="cpu")
    return randomize(model)


def build_gemma3() -> nn.Module:
    """Return a Gemma 3 without its vision tower, which the class builds in one size only."""
    import comfy.ops
    from comfy.text_encoders.llama import Gemma3_12B

    operations = comfy.ops.disable_weight_init
    model = Gemma3_12B(_LLAMA, dtype=torch.float32, device="meta", operations=operations)
    model.vision_model = model.multi_modal_projector = nn.Identity()
    model.model.to_empty(device="cpu")
    return randomize(model)


def encode(model: nn.Module) -> torch.Tensor:
    """Return the embeddings of two prompts, and of a picture where the model takes one."""
    with torch.inference_mode():
        words: Any = model(WORDS, WORDS_MASK, dtype=torch.float32)[0]
        if not hasattr(model, "visual"):
            return words
        picture = noise(1, 56, 84, 3).sigmoid()
        vision = model.preprocess_embed({"type": "image", "data": picture}, "cpu")[0]  # type: ignore[operator]
    return torch.cat([words.flatten(), vision.flatten()])
