"""A tiny CLIP of ComfyUI's own classes: a T5 with five heads and a CLIP-L, as FLUX.1 has them."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import nn

from .quantized_patchers import quantized_state
from .tiny_models import randomize

_T5_CONFIG = {
    "num_layers": 2, "d_model": 40, "d_kv": 8, "num_heads": 5, "d_ff": 96, "vocab_size": 64,
    "dense_act_fn": "gelu_pytorch_tanh", "is_gated_act": True, "model_type": "t5",
}  # fmt: skip
_CLIP_CONFIG = {
    "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64,
    "hidden_act": "quick_gelu", "max_position_embeddings": 77, "eos_token_id": 1,
}  # fmt: skip


class _Tokenizer:
    """One token a word, the number after a colon its weight: ``a:1.5 red fox``."""

    def __init__(self, **_: Any) -> None:
        pass

    def tokenize_with_weights(self, text: str, return_word_ids: bool = False, **_: Any) -> dict[str, Any]:
        words = [word.partition(":") for word in text.split()]
        ids = [
            2 + int.from_bytes(hashlib.sha256(word.encode()).digest()[:4], "big") % 60 for word, *_ in words
        ]
        pairs = [(number, float(weight or 1)) for number, (*_, weight) in zip(ids, words, strict=True)]
        padding = [(0, 1.0)] * (8 - len(pairs))
        return {"t5xxl": [[*pairs, (1, 1.0), *padding]], "l": [[*pairs, *[(1, 1.0)] * (77 - len(pairs))]]}

    def state_dict(self) -> dict[str, Any]:
        return {}


def _stage(device: Any = "cpu", dtype: Any = None, model_options: Any = None) -> nn.Module:
    from comfy.sd1_clip import SDClipModel
    from comfy.text_encoders.t5 import T5

    class Stage(nn.Module):
        """The two encoders side by side."""

        def __init__(self) -> None:
            super().__init__()
            common: dict[str, Any] = {"device": device, "dtype": torch.float32, "layer": "last"}
            self.t5xxl = SDClipModel(
                **common, textmodel_json_config=_T5_CONFIG, model_class=T5, enable_attention_masks=True,
                special_tokens={"end": 1, "pad": 0}, return_attention_masks=True,
                model_options=dict(model_options or {}),
            )  # fmt: skip
            self.clip_l = SDClipModel(
                **common, textmodel_json_config=_CLIP_CONFIG, return_projected_pooled=False,
                special_tokens={"start": 0, "end": 1, "pad": 1},
            )  # fmt: skip
            self.dtypes = {torch.float32}

        def set_clip_options(self, options: dict[str, Any]) -> None:
            self.t5xxl.set_clip_options(options)
            self.clip_l.set_clip_options(options)

        def reset_clip_options(self) -> None:
            self.t5xxl.reset_clip_options()
            self.clip_l.reset_clip_options()

        def encode_token_weights(self, tokens: dict[str, Any]) -> tuple:
            cond, _, extra = self.t5xxl.encode_token_weights(tokens["t5xxl"])
            _, pooled = self.clip_l.encode_token_weights(tokens["l"])
            return cond, pooled, extra

    with torch.no_grad():
        return randomize(Stage())


def tiny_prompt_clip(*, form: str | None = None) -> Any:
    """Return a ``comfy.sd.CLIP`` of both encoders in fp32 with random weights.

    Args:
        form: How the weights of T5's blocks are quantized, a name of ``comfy.quant_ops.QUANT_ALGOS``.
    """
    import comfy.sd
    import comfy.supported_models_base

    target = comfy.supported_models_base.ClipTarget(_Tokenizer, _stage)
    target.params = {}
    clip = comfy.sd.CLIP(target, parameters=0)
    if form is None:
        return clip
    with torch.inference_mode():
        state = quantized_state(clip.cond_stage_model, form, input_scales=False)
    options = {"quantization_metadata": {"mixed_ops": True}}
    return comfy.sd.CLIP(target, parameters=0, state_dict=state, model_options=options)
