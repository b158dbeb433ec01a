"""Attention over a part of the keys, in a form that can be merged with other parts exactly.

softmax over all keys is a weighted mean of the softmaxes over parts of them. A part therefore comes
with the two numbers that its weight is made of: the largest score and the sum of exponentials below
it. Kernels that return one log-sum-exp instead have it as the score and a sum of 1. Keeping two
numbers is exact even where every score is a huge negative constant (a finite mask), which absorbs
the logarithm of the sum.

Source: the blockwise softmax of Ring Attention, arXiv:2310.01889.

Shapes: ``B`` batch, ``H`` heads, ``Q`` queries, ``K`` keys of the part, ``D`` head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.attention import SDPBackend

from ...errors import PlanError

_aten = torch.ops.aten

# Stands for -inf in a mask for the fused kernel, which multiplies it by log2(e): no dtype's lowest number
# may overflow there. Weights are computed from it in fp32, and are zero.
_MASKED = {torch.float16: -3e4, torch.bfloat16: -1e30}

# Scores of the plain kernel that exist at one time, on each device.
_SCORES_BYTES = 256 * 2**20


@dataclass(frozen=True)
class PartialAttention:
    """Attention of some queries over a part of the keys.

    Args:
        sums: ``[B, H, Q, D]``: ``sum(exp(score - largest) * v)``; of the kernel's dtype as it comes from
            a kernel, fp32 once merged.
        largest: ``[B, H, Q, 1]``, fp32: the largest score, -inf if every key is masked.
        weights: ``[B, H, Q, 1]``, fp32: ``sum(exp(score - largest))``.
    """

    sums: torch.Tensor
    largest: torch.Tensor
    weights: torch.Tensor

    def merge(self, other: PartialAttention) -> PartialAttention:
        """Return the attention over the keys of both parts."""
        largest = torch.maximum(self.largest, other.largest)
        # Where both are -inf any finite number will do: both sums are zero there.
        finite = torch.where(largest == -torch.inf, 0.0, largest)
        mine, theirs = torch.exp(self.largest - finite), torch.exp(other.largest - finite)
        # Two passes over the memory of the sums, cast on the way.
        sums = (self.sums * mine).addcmul_(other.sums, theirs)
        return PartialAttention(sums, largest, self.weights * mine + other.weights * theirs)

    def output(self, dtype: torch.dtype) -> torch.Tensor:
        """Return ``[B, Q, H, D]``, contiguous; a query without any key gets zeros, as in PyTorch."""
        batch, num_heads, num_queries, head_dim = self.sums.shape
        output = self.sums.new_empty(batch, num_queries, num_heads, head_dim, dtype=dtype)
        factors = torch.where(self.weights == 0, 1.0, self.weights).reciprocal_()
        return torch.mul(self.sums.transpose(1, 2), factors.transpose(1, 2), out=output)


def attend_part(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, mask: torch.Tensor | None, scale: float | None
) -> PartialAttention:
    """Attend to a part of the keys with the fastest kernel that takes these inputs.

    Args:
        q: ``[B, H, Q, D]``, any strides.
        k: ``[B, H, K, D]``, one dtype with ``q``; ``K`` at least 1.
        v: Likewise.
        mask: Broadcasts to ``[B, H, Q, K]``; bool (True attends) or floating (added), or None.
        scale: Of the scores; None is ``D ** -0.5``.

    Raises:
        PlanError: If the mask is neither bool nor floating.
    """
    if mask is not None and mask.dtype != torch.bool and not mask.is_floating_point():
        raise PlanError(f"an attention mask is bool or floating, got {mask.dtype}")
    backend = choose_backend(q, k, v, mask=mask)
    if backend is SDPBackend.CUDNN_ATTENTION:
        output, lse = _aten._scaled_dot_product_cudnn_attention(
            q, k, v, _bias(mask, q, k), True, 0.0, False, False, scale=scale
        )[:2]
        return _from_fused(output, lse.reshape(lse.shape[:3]), mask)
    if backend is SDPBackend.FLASH_ATTENTION:
        if q.device.type == "cpu":
            return _from_lse(*_aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, scale=scale))
        output, lse = _aten._scaled_dot_product_flash_attention(q, k, v, scale=scale)[:2]
        return _from_lse(output, lse)
    if backend is SDPBackend.EFFICIENT_ATTENTION:
        bias = _bias(mask, q, k)
        bias = None if bias is None else bias.expand(*q.shape[:3], k.shape[2])
        output, lse = _aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, scale=scale)[:2]
        return _from_fused(output, lse[..., : q.shape[2]], mask)
    return plain_attention(q, k, v, mask=mask, scale=scale)


def choose_backend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, mask: torch.Tensor | None
) -> SDPBackend:
    """Return the kernel for these inputs; ``MATH`` is ``plain_attention``.

    On CUDA a kernel must be enabled in PyTorch (``torch.nn.attention.sdpa_kernel``) and take the
    inputs. fp32 always takes the plain kernel there: the fused one rounds it to TF32.
    """
    if q.device.type == "cpu":
        plain = mask is not None or q.dtype == torch.float64
        return SDPBackend.MATH if plain else SDPBackend.FLASH_ATTENTION
    if q.device.type != "cuda" or q.dtype not in (torch.float16, torch.bfloat16) or q.shape[-1] % 8:
        return SDPBackend.MATH
    cuda = torch.backends.cuda
    params = cuda.SDPAParams(q, k, v, None, 0.0, False, False)
    if cuda.cudnn_sdp_enabled() and cuda.can_use_cudnn_attention(params):
        return SDPBackend.CUDNN_ATTENTION
    if mask is None and cuda.flash_sdp_enabled() and cuda.can_use_flash_attention(params):
        return SDPBackend.FLASH_ATTENTION
    if cuda.mem_efficient_sdp_enabled() and cuda.can_use_efficient_attention(params):
        return SDPBackend.EFFICIENT_ATTENTION
    return SDPBackend.MATH


def plain_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, mask: torch.Tensor | None, scale: float | None
) -> PartialAttention:
    """Attend by two matrix products in fp32, a limited number of queries at a time; see ``attend_part``."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    keys, values = k.to(dtype).transpose(-1, -2), v.to(dtype)
    row_bytes = q.shape[0] * q.shape[1] * k.shape[2] * dtype.itemsize
    num_rows = max(1, _SCORES_BYTES // row_bytes)
    pieces: list[PartialAttention] = []
    for start in range(0, q.shape[2], num_rows):
        scores = (q[:, :, start : start + num_rows].to(dtype) * factor) @ keys
        if mask is not None:
            rows = mask if mask.shape[-2] == 1 else mask[..., start : start + num_rows, :]
            if mask.dtype == torch.bool:
                scores = scores.masked_fill(~rows, -torch.inf)
            else:
                scores = scores + rows.to(dtype)
        largest = scores.amax(-1, keepdim=True)
        scores = torch.exp(scores - torch.where(largest == -torch.inf, 0.0, largest))
        pieces.append(PartialAttention(scores @ values, largest, scores.sum(-1, keepdim=True)))
    if len(pieces) == 1:
        return pieces[0]
    return PartialAttention(
        torch.cat([piece.sums for piece in pieces], 2),
        torch.cat([piece.largest for piece in pieces], 2),
        torch.cat([piece.weights for piece in pieces], 2),
    )


def _from_lse(output: torch.Tensor, lse: torch.Tensor) -> PartialAttention:
    """Return the part from a kernel's normalised output ``[B, H, Q, D]`` and log-sum-exp ``[B, H, Q]``."""
    largest = lse.float().unsqueeze(-1)
    return PartialAttention(output, largest, torch.ones_like(largest))


def _from_fused(output: torch.Tensor, lse: torch.Tensor, mask: torch.Tensor | None) -> PartialAttention:
    """Return the part, with no weight for queries whose keys are all masked by ``_bias``."""
    part = _from_lse(output, lse)
    if mask is None or mask.dtype != torch.bool:
        return part
    empty = part.largest < _MASKED[output.dtype] / 2
    return PartialAttention(
        part.sums.masked_fill(empty, 0.0),
        part.largest.masked_fill(empty, -torch.inf),
        part.weights.masked_fill(empty, 0.0),
    )


def _bias(mask: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor | None:
    """Return the mask as the fused kernels want it: added, of q's dtype, rows aligned to 16 bytes.

    Masked keys get a very low finite number instead of -inf: one of the kernels gives the log-sum-exp 0
    for a query without any key, and a part of that weight would not vanish when it is merged.
    """
    if mask is None:
        return None
    num_keys = k.shape[2]
    padded = -(-num_keys // 16) * 16
    lowest = _MASKED[q.dtype]
    if mask.dtype == torch.bool:
        values = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill_(~mask, lowest)
    else:
        values = mask.clamp(min=lowest).to(q.dtype)
    bias = q.new_zeros(*values.shape[:-1], padded)[..., :num_keys]
    return bias.copy_(values)
