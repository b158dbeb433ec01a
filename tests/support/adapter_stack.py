"""Blocks whose frozen base weight is kept in some other way, each with a trained layer beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class AdapterBlock(nn.Module):
    """``base`` is frozen, ``adapter`` is trained."""

    def __init__(self, width: int, change: Callable[[Tensor], nn.Parameter]) -> None:
        super().__init__()
        self.base = nn.Linear(width, width, bias=False).requires_grad_(False)
        self.base.weight = change(self.base.weight)
        self.adapter = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.base(x)) + self.adapter(x)


class AdapterStack(nn.Module):
    """A block for each of ``changes``, which return what stands in for a base weight; always the same."""

    def __init__(
        self,
        width: int,
        changes: Iterable[Callable[[Tensor], nn.Parameter]],
        *,
        checkpointing: bool = True,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.width = width
        self.blocks: Any = nn.ModuleList(AdapterBlock(width, change) for change in changes)
        self.checkpointing = checkpointing

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointing else block(x)
        return x


def adapter_gradients(model: AdapterStack) -> list[Tensor]:
    """Return the gradients of one step: of the input, and of every adapter."""
    model.zero_grad()
    x = torch.randn(3, model.width, generator=torch.Generator().manual_seed(1)).requires_grad_()
    model(x).square().mean().backward()
    assert x.grad is not None
    return [x.grad, *(block.adapter.weight.grad.clone() for block in model.blocks)]
