"""PyTorch's attention by cuDNN, where that is its faster kernel: on Hopper and newer GPUs.

PyTorch itself prefers FlashAttention 2, which reaches half of cuDNN's speed there: 4.85 against 2.55 ms a
block of Qwen-Image at 2048 pixels on two H200. Only calls of a caller's plain PyTorch attention are changed;
another backend that a user chose (sage, xformers, FlashAttention 3) stays.

Shapes: ``B`` batch, ``S`` tokens, ``H`` heads, ``D`` head dim.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import Any

import torch
from torch.nn.attention import SDPBackend

from .local import AttentionFunction, heads_first
from .lse import choose_backend

_FIRST_CAPABILITY = (9, 0)
# PyTorch's callers split larger batches.
_MAX_BATCH = 2**15


def with_cudnn(override: AttentionFunction | None, plain: Collection[AttentionFunction]) -> AttentionFunction:
    """Return an attention override that hands ``override`` the faster form of plain functions.

    Args:
        override: Called with the function and its arguments, or None to call the function itself.
        plain: Functions that are PyTorch's ``scaled_dot_product_attention`` in the convention of ``local``.
    """

    def choose(function: AttentionFunction, *args: Any, **kwargs: Any) -> torch.Tensor:
        if function in plain:
            function = prefer_cudnn(function)
        return function(*args, **kwargs) if override is None else override(function, *args, **kwargs)

    return choose


@functools.cache
def prefer_cudnn(function: AttentionFunction) -> AttentionFunction:
    """Return ``function`` with cuDNN's kernel for the calls that it takes; masked ones are not among them."""

    def attention(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        heads: int,
        mask: torch.Tensor | None = None,
        attn_precision: torch.dtype | None = None,
        skip_reshape: bool = False,
        skip_output_reshape: bool = False,
        **options: Any,
    ) -> torch.Tensor:
        if mask is None and q.device.type == "cuda" and not options.get("enable_gqa"):
            whole = (q, k, v) if skip_reshape else tuple(heads_first(tensor, heads) for tensor in (q, k, v))
            if takes(*whole):
                output = _run(*whole, scale=options.get("scale"))
                return output if skip_output_reshape else output.transpose(1, 2).flatten(2)
        return function(
            q, k, v, heads, mask, attn_precision, skip_reshape, skip_output_reshape, **options
        )  # fmt: skip

    return attention


def takes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Return whether cuDNN's kernel is there, takes ``[B, H, S, D]`` like these, and is the faster one."""
    if q.shape[0] > _MAX_BATCH or _capability(q.device) < _FIRST_CAPABILITY:
        return False
    return choose_backend(q, k, v, mask=None) is SDPBackend.CUDNN_ATTENTION


def _run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float | None) -> torch.Tensor:
    attention = torch.ops.aten._scaled_dot_product_cudnn_attention
    return attention(q, k, v, None, False, 0.0, False, False, scale=scale)[0]


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
