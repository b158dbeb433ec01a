"""Decode a latent on several ranks, each a strip of the picture, exactly.

Not tiling: neighbours trade the rows that convolutions see, group norms take the statistics of the whole
picture, and attention sees all of it, so that there are no seams.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..errors import PlanError
from ..module_hooks import hook_names, install_hook, remove_hook
from .spatial_layers import (
    FrameChunks,
    GroupNormHook,
    HaloHook,
    PaddedConvolutionHook,
    StripAttention,
    StripState,
)
from .spatial_noise import StripNoise
from .spatial_plan import SpatialPlan, SpatialRole, planned_modules
from .strips import Strips, even_strips

_HOOK = "spatial_parallel"
_ATTENTION = "optimized_attention"


class SpatialHandle:
    """An autoencoder whose decoder can work on strips; made by ``parallelize_decoder``.

    Args:
        model: The autoencoder.
        plan: Its plan.
        group: The ranks.
    """

    def __init__(self, model: nn.Module, plan: SpatialPlan, group: dist.ProcessGroup) -> None:
        self.group = group
        self.plan = plan
        self.state = StripState()
        self._hooked: list[nn.Module] = []
        self._attention: list[tuple[nn.Module, Callable]] = []
        self._chunked: nn.Module | None = None
        modules = planned_modules(model, plan)
        for path, module, _ in modules:
            if _HOOK in hook_names(module):
                raise PlanError(f"{path} is parallel already; call remove() first")
        for path, module, role in modules:
            self._attach(path, module, role, plan)
        decoder: Any = getattr(model, "decoder", None)
        if plan.chunk_limit and hasattr(decoder, plan.chunk_limit):
            self._chunked = decoder
            method = getattr(decoder, plan.chunk_limit)
            decoder.__dict__[plan.chunk_limit] = FrameChunks(method, self.state)

    def decode(
        self,
        decode: Callable[..., torch.Tensor],
        latent: torch.Tensor,
        *,
        generator: torch.Generator | None = None,
        **options: Any,
    ) -> torch.Tensor:
        """Return this rank's strip of the picture; all ranks call it with the same latent.

        Args:
            decode: The autoencoder's own method.
            latent: The whole latent ``[B, C, H, W]`` or ``[B, C, T, H, W]``. It is cut along the longer of
                its last two dims.
            generator: Of the noise that decoding draws, in the same state on all ranks; left as one process
                would leave its own. Needed by plans with ``draws_noise``.
            options: Further arguments of ``decode``.

        Returns:
            What ``decode`` returns of the strip; joined along ``cut_dim(latent)`` in rank order the strips
            are the picture. If that dim has fewer rows than there are ranks, rank 0 returns all of it and
            the others an empty strip.
        """
        ranks, rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        dim = cut_dim(latent)
        rows = even_strips(latent.shape[dim], ranks)
        if ranks == 1 or min(rows) == 0:
            with self._noise(None, generator):
                whole = decode(latent, **options)
            return whole if rank == 0 else whole.narrow(dim, 0, 0)
        strips = Strips(rows, dim, rank, self.group)
        self.state.strips, self.state.device = strips, latent.device
        try:
            with self._noise(strips, generator):
                return decode(strips.take(latent), **options)
        finally:
            self.state.strips = None

    def _noise(
        self, strips: Strips | None, generator: torch.Generator | None
    ) -> contextlib.AbstractContextManager[Any]:
        if not self.plan.draws_noise:
            return contextlib.nullcontext()
        if generator is None:
            raise PlanError(f"decoding by the plan {self.plan.name} draws noise and needs a generator")
        return StripNoise(strips, generator)

    def remove(self) -> None:
        """Take everything off again."""
        for module in self._hooked:
            remove_hook(module, _HOOK)
        for module, original in self._attention:
            setattr(module, _ATTENTION, original)
        if self._chunked is not None:
            del self._chunked.__dict__[self.plan.chunk_limit]
        self._hooked, self._attention, self._chunked = [], [], None

    def _attach(self, path: str, module: nn.Module, role: SpatialRole, plan: SpatialPlan) -> None:
        if role is SpatialRole.ATTENTION:
            original = module.__dict__.get(_ATTENTION)
            if original is None:
                raise PlanError(f"{path} holds no {_ATTENTION}, which the plan {plan.name} replaces")
            self._attention.append((module, original))
            setattr(module, _ATTENTION, StripAttention(original, self.state))
        elif role is SpatialRole.CONVOLUTION:
            install_hook(module, _HOOK, HaloHook(self.state, plan.cache_arguments))
            self._hooked.append(module)
        elif role is SpatialRole.PADDED_CONVOLUTION:
            install_hook(module, _HOOK, PaddedConvolutionHook(self.state))
            self._hooked.append(module)
        elif role is SpatialRole.GROUP_NORM:
            install_hook(module, _HOOK, GroupNormHook(self.state))
            self._hooked.append(module)


def cut_dim(latent: torch.Tensor) -> int:
    """Return the dim along which a latent is cut: the longer one of height (-2) and width (-1)."""
    return -1 if latent.shape[-1] > latent.shape[-2] else -2


def parallelize_decoder(model: nn.Module, plan: SpatialPlan, *, group: dist.ProcessGroup) -> SpatialHandle:
    """Prepare an autoencoder for decoding on the ranks of ``group``.

    Args:
        model: Of the plan's class; the same weights on every rank.
        plan: Its plan.
        group: The ranks.

    Raises:
        RequestError: If a layer is not covered by the plan.
        PlanError: If the model is parallel already.
    """
    return SpatialHandle(model, plan, group)
