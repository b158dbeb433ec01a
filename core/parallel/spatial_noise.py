"""Noise that a decoder draws while it works on a strip: that of the whole picture, and of it the strip."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..errors import PlanError
from .strips import Strips


class StripNoise(TorchFunctionMode):
    """Within it, ``torch.randn`` and ``torch.randn_like`` give this rank's strip of what one process draws.

    All ranks draw the whole noise from generators in the same state, so nothing is exchanged.

    Args:
        strips: The cut; None: every rank decodes the whole picture.
        generator: This rank's; on its own device or on the CPU.
    """

    def __init__(self, strips: Strips | None, generator: torch.Generator) -> None:
        super().__init__()
        self.strips = strips
        self.generator = generator

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Run a function of torch, the two above as said."""
        kwargs = kwargs or {}
        if func is torch.randn_like:
            (like,) = args
            return self._draw(like.shape, kwargs.get("dtype") or like.dtype, like.device)
        if func is torch.randn:
            if kwargs.get("generator") is not None or "out" in kwargs:
                raise PlanError("a decoder draws noise from a generator of its own")
            shape = args[0] if len(args) == 1 and not isinstance(args[0], int) else args
            device = torch.device(kwargs.get("device") or "cpu")
            return self._draw(tuple(shape), kwargs.get("dtype") or torch.get_default_dtype(), device)
        return func(*args, **kwargs)

    def _draw(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        whole, start, height = list(shape), 0, 0
        if self.strips is not None:
            heights = self.strips.heights_of(shape[self.strips.dim])
            whole[self.strips.dim] = sum(heights)
            start, height = sum(heights[: self.strips.rank]), heights[self.strips.rank]
        noise = torch.randn(whole, generator=self.generator, dtype=dtype, device=self.generator.device)
        if self.strips is not None:
            noise = noise.narrow(self.strips.dim, start, height)
        return noise.to(device)
