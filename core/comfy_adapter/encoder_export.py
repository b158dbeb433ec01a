"""What a worker needs to rebuild the transformer of a ComfyUI text encoder."""

from __future__ import annotations

import dataclasses
from typing import Any

import comfy.text_encoders.t5
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..errors import RequestError
from ..parallel import ModelPlan, dotted_path
from . import quantized
from .model_export import linear_operations, named_tensors
from .quantized_parts import find_unaligned, find_uncuttable, find_unscaled

_T5 = "comfy.text_encoders.t5.T5"
_PLAIN = (type(None), bool, int, float, str, list, tuple, dict)


def describe_encoder(transformer: Any, plan: ModelPlan, *, gpus: int, patch_prefix: str) -> dict[str, Any]:
    """Return the message from which a worker builds the same, empty transformer.

    Args:
        transformer: ``SDClipModel.transformer``.
        plan: The plan of its class.
        gpus: How many workers share its weights.
        patch_prefix: How names of its weights begin in patches of the CLIP.

    Raises:
        RequestError: If its weights are quantized in a way that cannot be cut, or of operations that workers
            do not know.
    """
    for name, tensor in named_tensors(transformer).items():
        if is_traceable_wrapper_subclass(tensor):
            layout = getattr(tensor, "_layout_cls", "")
            raise _refusal(transformer, f"{name} is a {type(tensor).__name__} {layout}".rstrip())
    uncut = find_uncuttable(transformer) or find_unscaled(transformer)
    uncut = uncut or find_unaligned(transformer, plan, gpus)
    if uncut is not None:
        raise _refusal(transformer, uncut)
    is_mixed = any(map(quantized.is_mixed_linear, transformer.modules()))
    operations = quantized.OPERATIONS if is_mixed else linear_operations(transformer)
    if operations is None:
        raise _refusal(transformer, "its Linear layers are of another node pack or an older form of fp8")
    more = {"quantized": quantized.describe_layers(transformer)} if is_mixed else {}
    return more | {
        "class_path": dotted_path(transformer),
        "config": _config(transformer),
        "dtype": transformer.dtype,
        "operations": operations,
        "patch_prefix": patch_prefix,
    }


def _config(transformer: Any) -> dict[str, Any]:
    """Return the configuration that the class was built with; a T5 keeps only what follows from it."""
    if dotted_path(transformer) == _T5:
        return _t5_config(transformer)
    config = dataclasses.asdict(transformer.model.config)
    foreign = [name for name, value in config.items() if not isinstance(value, _PLAIN)]
    if foreign:
        raise _refusal(transformer, f"its configuration holds {foreign}")
    return config


def _t5_config(transformer: Any) -> dict[str, Any]:
    blocks = transformer.encoder.block
    attention, feed_forward = blocks[0].layer[0].SelfAttention, blocks[0].layer[1].DenseReluDense
    every_block = len(blocks) > 1 and blocks[1].layer[0].SelfAttention.relative_attention_bias is not None
    return {
        "num_layers": len(blocks),
        "d_model": transformer.shared.embedding_dim,
        "d_kv": attention.q.out_features // attention.num_heads,
        "num_heads": attention.num_heads,
        "d_ff": feed_forward.wo.in_features,
        "vocab_size": transformer.shared.num_embeddings,
        "is_gated_act": hasattr(feed_forward, "wi_0"),
        "model_type": "umt5" if every_block else "t5",
        "dense_act_fn": _activation_name(transformer, feed_forward),
    }


def _activation_name(transformer: nn.Module, feed_forward: Any) -> str:
    for name, function in comfy.text_encoders.t5.activations.items():
        if function is feed_forward.act:
            return name
    raise _refusal(transformer, f"its activation is {feed_forward.act!r}")


def _refusal(transformer: nn.Module, what: str) -> RequestError:
    return RequestError(
        f"sharing the weights of the text encoder {type(transformer).__name__} was asked, but {what}",
        limit="Workers share plain weights and, with newer ComfyUI, those in fp8, int8, mxfp8 and nvfp4",
        way_out="Load an unquantized or fp8 file of it, or encode on one GPU",
    )
