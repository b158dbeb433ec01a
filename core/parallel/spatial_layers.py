"""Layers of a decoder that see more than their own rows, each made to compute a strip of the whole.

Each hook acts only while a ``StripState`` is active; otherwise the module is what it was.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..errors import PlanError
from ..module_hooks import Forward, ModuleHook
from .collectives import all_gather
from .spatial_plan import window_radius
from .strips import Strips

# Largest fp32 copy that a norm makes of its input, in values.
_NORM_CHUNK = 1 << 25


class StripState:
    """The strips of the decode under way, or None while there is none, and where this rank computes."""

    def __init__(self) -> None:
        self.strips: Strips | None = None
        self.device = torch.device("cpu")


class HaloHook(ModuleHook):
    """Gives a convolution the rows around its strip, and drops what it makes of them.

    At the picture's borders the convolution pads as ever. What it pads at the seams goes into dropped rows.

    Args:
        state: The decode's strips.
        cache_arguments: See ``SpatialPlan``.
    """

    def __init__(self, state: StripState, cache_arguments: tuple[str, str] | tuple[()]) -> None:
        self.state = state
        self.cache_arguments = cache_arguments

    def run(self, forward: Forward, module: nn.Module, args: tuple, kwargs: dict) -> Any:
        """Return the convolution's rows of this strip."""
        strips = self.state.strips
        radius = 0 if strips is None else window_radius(module, strips.dim)
        if strips is None or radius == 0:
            return forward(*args, **kwargs)
        height = args[0].shape[strips.dim]
        above, _ = strips.sides(args[0], radius)
        args = tuple(self._extend(value, strips, radius) for value in args)
        kwargs = {name: self._extend(value, strips, radius) for name, value in kwargs.items()}
        self._extend_cache(kwargs, strips, radius)
        output = forward(*args, **kwargs)
        return output.narrow(strips.dim, above, height)

    @staticmethod
    def _extend(value: Any, strips: Strips, radius: int) -> Any:
        return strips.extend(value, radius) if isinstance(value, torch.Tensor) else value

    def _extend_cache(self, kwargs: dict, strips: Strips, radius: int) -> None:
        if not self.cache_arguments or kwargs.get(self.cache_arguments[0]) is None:
            return
        list_name, index_name = self.cache_arguments
        cache, index = kwargs[list_name], kwargs[index_name]
        cached, cache[index] = cache[index], None
        kwargs |= {list_name: [self._extend(cached, strips, radius)], index_name: 0}


class PaddedConvolutionHook(ModuleHook):
    """Puts the neighbours' rows where a convolution's input was padded at the seams.

    Args:
        state: The decode's strips.
    """

    def __init__(self, state: StripState) -> None:
        self.state = state

    def run(self, forward: Forward, module: nn.Module, args: tuple, kwargs: dict) -> Any:
        """Return the convolution's rows of this strip; ``args[0]`` has one more on each side."""
        strips = self.state.strips
        radius = 0 if strips is None else window_radius(module, strips.dim)
        if strips is None or radius == 0:
            return forward(*args, **kwargs)
        (padded,) = args
        height = padded.shape[strips.dim] - 2 * radius
        mine = padded.narrow(strips.dim, radius, height)
        above, below = strips.sides(mine, radius)
        parts = [strips.extend(mine, radius)]
        if not above:
            parts.insert(0, padded.narrow(strips.dim, 0, radius))
        if not below:
            parts.append(padded.narrow(strips.dim, radius + height, radius))
        return forward(torch.cat(parts, dim=strips.dim), **kwargs)


class FrameChunks:
    """Stands for a decoder's method that decodes as many frames at once as a number of bytes allows.

    Strips differ in height, and GPUs in memory: without it ranks would cut their frames differently, and
    wait for exchanges that others never make. With it they cut them as one process does, which matters
    where noise is drawn for each chunk.

    Args:
        original: The method; its last argument is the number of bytes.
        state: The decode's strips.
    """

    def __init__(self, original: Callable[..., Any], state: StripState) -> None:
        self.original = original
        self.state = state
        self._known: tuple[Strips, int] | None = None

    def __call__(self, *args: Any) -> Any:
        """Call the method with a limit in proportion to the strip; collective, once a decode."""
        strips = self.state.strips
        if strips is None:
            return self.original(*args)
        if self._known is None or self._known[0] is not strips:
            self._known = strips, self._bytes_of_a_row(strips, args[-1], self.state.device)
        return self.original(*args[:-1], self._known[1] * strips.rows[strips.rank])

    @staticmethod
    def _bytes_of_a_row(strips: Strips, limit_bytes: int, device: torch.device) -> int:
        assert strips.group is not None
        limit = torch.tensor([limit_bytes], device=device)
        limits = all_gather(limit, [1] * len(strips.rows), group=strips.group)
        return -(-int(limits.min()) // sum(strips.rows))


class GroupNormHook(ModuleHook):
    """Computes a GroupNorm with the mean and variance of all strips, in fp32."""

    def __init__(self, state: StripState) -> None:
        self.state = state

    def run(self, forward: Forward, module: nn.Module, args: tuple, kwargs: dict) -> Any:
        """Return the norm of ``args[0]``, ``[B, C, ..., rows, columns]``."""
        strips = self.state.strips
        if strips is None:
            return forward(*args, **kwargs)
        (x,) = args
        assert isinstance(module, nn.GroupNorm)
        chunk = max(1, _NORM_CHUNK * x.shape[1] // max(1, x.numel()))
        mean, variance = _group_statistics(x, module.num_groups, strips, chunk)
        rstd = (variance + module.eps).rsqrt()
        per_channel = x.shape[1] // module.num_groups
        scale, mean = rstd.repeat_interleave(per_channel, 1), mean.repeat_interleave(per_channel, 1)
        shift = -mean * scale
        if module.affine:
            weight, bias = module.weight.float(), module.bias.float()
            scale, shift = scale * weight, shift * weight + bias
        output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        ones = (1,) * (x.ndim - 2)
        parts = (tensor.split(chunk, dim=1) for tensor in (output, x, scale, shift))
        for out_part, x_part, scale_part, shift_part in zip(*parts, strict=True):
            scaled = x_part.float() * scale_part.view(*scale_part.shape, *ones)
            out_part.copy_(scaled.add_(shift_part.view(*shift_part.shape, *ones)))
        return output


def _group_statistics(
    x: torch.Tensor, groups: int, strips: Strips, chunk: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean and variance ``[B, groups]`` over all strips, merged as Chan et al. (1979) do."""
    dims = tuple(range(2, x.ndim))
    parts = [torch.var_mean(part.float(), dim=dims, correction=0) for part in x.split(chunk, dim=1)]
    variance, mean = (torch.cat(values, dim=1).double() for values in zip(*parts, strict=True))
    variance, mean = _merge(variance.unflatten(1, (groups, -1)), mean.unflatten(1, (groups, -1)), None)
    heights = strips.heights(x)
    assert strips.group is not None
    mine = torch.stack([variance, mean], dim=-1).unsqueeze(0)
    every = all_gather(mine, [1] * len(heights), group=strips.group)
    shares = every.new_tensor(heights) / sum(heights)
    variance, mean = _merge(every[..., 0].movedim(0, -1), every[..., 1].movedim(0, -1), shares)
    return mean.float(), variance.float()


def _merge(
    variances: torch.Tensor, means: torch.Tensor, shares: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return variance and mean of the union of sets along the last dim.

    Args:
        variances: ``[..., sets]``.
        means: ``[..., sets]``.
        shares: Each set's part of the values ``[sets]``; None: equal parts.
    """
    weights = means.new_full((means.shape[-1],), 1 / means.shape[-1]) if shares is None else shares
    mean = (means * weights).sum(-1)
    spread = (means - mean.unsqueeze(-1)).square()
    return ((variances + spread) * weights).sum(-1), mean


class StripAttention:
    """Stands for an attention block's function: queries of this strip, keys and values of all.

    Args:
        original: The function that it replaces, called while no decode is under way.
        state: The decode's strips.
    """

    def __init__(self, original: Callable[..., torch.Tensor], state: StripState) -> None:
        self.original = original
        self.state = state

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Return ``softmax(q k) v`` over all positions, one head of all channels.

        Args:
            q: ``[B, C, ..., rows, columns]``.
            k: Likewise.
            v: Likewise.
        """
        strips = self.state.strips
        if strips is None:
            return self.original(q, k, v)
        if not q.shape == k.shape == v.shape:
            raise PlanError(f"attention of {tuple(q.shape)} over {tuple(k.shape)} is not one of strips")
        # One exchange for both.
        keys, values = strips.gather(torch.cat([k, v], dim=1)).chunk(2, dim=1)
        queries, keys, values = (
            part.flatten(2).transpose(1, 2).unsqueeze(1).contiguous() for part in (q, keys, values)
        )
        output = F.scaled_dot_product_attention(queries, keys, values)
        return output.squeeze(1).transpose(1, 2).reshape(q.shape)
