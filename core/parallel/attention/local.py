"""The calling convention of attention functions, and the attention of one rank.

Models call ``attention(q, k, v, heads, mask, attn_precision, skip_reshape, skip_output_reshape, **more)``:
with ``skip_reshape`` q, k and v are ``[B, H, S, D]``, without it ``[B, S, H * D]`` (or ``[B, S, H, D]``,
which backends that use ``view`` accept, and Stable Diffusion 3 gives for v); the output is
``[B, S, H * D]``, or ``[B, H, S, D]`` with ``skip_output_reshape``. The function is whatever backend
the caller chose (PyTorch, flash, sage, xformers); nothing here replaces it.

Shapes: ``B`` batch, ``S`` tokens, ``H`` heads, ``D`` head dim.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import PlanError

AttentionFunction = Callable[..., torch.Tensor]

_POSITIONAL = ("mask", "attn_precision", "skip_reshape", "skip_output_reshape")


@dataclass(frozen=True)
class AttentionCall:
    """One call of an attention function, in one layout whatever the caller's was.

    Args:
        function: The backend.
        q: ``[B, H, S, D]``, any strides; ``k`` and ``v`` alike, and of one dtype.
        mask: As the caller gave it, or None.
        keeps_heads: Whether the caller wants ``[B, H, S, D]`` back.
        options: Everything else, handed to the backend as it is.
    """

    function: AttentionFunction
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor | None
    keeps_heads: bool
    options: dict[str, Any]

    @property
    def num_heads(self) -> int:
        """Heads of q, k and v."""
        return self.q.shape[1]

    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Run the backend on other tensors ``[B, h, S, D]`` with this call's options.

        Returns:
            ``[B, S, h * D]``.
        """
        return self.function(q, k, v, q.shape[1], mask=mask, skip_reshape=True, **self.options)

    def read_mask(self, mask: torch.Tensor | None) -> torch.Tensor | None:
        """Return a mask for other kernels than the backend's, to whom True means that a key is attended to.

        That is what a bool mask means to PyTorch's attention. Backends that add it to the scores instead
        (ComfyUI's sub-quadratic and split attention) read True as 1; here one process decides, not we.
        """
        if mask is None or mask.dtype != torch.bool:
            return mask
        added = _adds_bool_masks(self.function, self.q.device, self.q.dtype, self.q.shape[3])
        return mask.to(self.q.dtype) if added else mask

    def as_asked(self, output: torch.Tensor) -> torch.Tensor:
        """Return ``output`` ``[B, S, H * D]`` in the layout that the caller asked for."""
        if not self.keeps_heads:
            return output
        return output.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)


@functools.lru_cache(maxsize=64)
def _adds_bool_masks(
    function: AttentionFunction, device: torch.device, dtype: torch.dtype, head_dim: int
) -> bool:
    """Ask a backend for the attention to two keys with equal scores, the second of them masked."""
    q, k = torch.zeros(2, 1, 1, 2, head_dim, device=device, dtype=dtype)
    v = torch.zeros_like(k)
    v[:, :, 1] = 1
    mask = torch.tensor([True, False], device=device).expand(1, 1, 2, 2)
    output = function(q, k, v, 1, mask=mask, skip_reshape=True)
    return output.abs().max().item() > 0.1


def parse_call(
    function: AttentionFunction,
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    heads: int,
    args: tuple,
    kwargs: dict[str, Any],
) -> AttentionCall:
    """Return the call ``function(*tensors, heads, *args, **kwargs)`` in one layout.

    Raises:
        PlanError: If q, k and v do not agree in heads, head dim, batch or dtype (grouped-query
            attention would need whole groups of heads on each rank).
    """
    options = {**dict(zip(_POSITIONAL, args, strict=False)), **kwargs}
    mask = options.pop("mask", None)
    keeps_heads = bool(options.pop("skip_output_reshape", False))
    if not options.pop("skip_reshape", False):
        tensors = tuple(heads_first(tensor, heads) for tensor in tensors)  # type: ignore[assignment]
    q, k, v = tensors
    alike = {(tensor.shape[0], tensor.shape[1], tensor.shape[3], tensor.dtype) for tensor in tensors}
    if len(alike) > 1 or q.shape[1] != heads:
        shapes = [f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in tensors]
        raise PlanError(f"self-attention with {heads} heads got q, k, v of {shapes}; they must agree")
    return AttentionCall(function, q, k, v, mask, keeps_heads, options)


def heads_first(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Return ``[B, H, S, D]`` from ``[B, S, H * D]`` or ``[B, S, H, D]``."""
    return (tensor if tensor.ndim == 4 else tensor.unflatten(-1, (heads, -1))).transpose(1, 2)
