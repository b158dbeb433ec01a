"""Optimizers by name, as torch has them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "Adam": torch.optim.Adam,
    "SGD": torch.optim.SGD,
    "RMSprop": torch.optim.RMSprop,
}


def build_optimizer(
    name: str, parameters: Iterable[nn.Parameter], *, learning_rate: float
) -> torch.optim.Optimizer:
    """Return the optimizer with torch's own defaults for everything but the learning rate."""
    return OPTIMIZERS[name](list(parameters), lr=learning_rate)  # pyright: ignore[reportCallIssue]


def gradients_are_finite(parameters: Iterable[nn.Parameter]) -> bool:
    """Return whether no gradient holds NaN or an infinite value."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return True
    # A sum of absolute values is NaN or infinite exactly if one of them is (or fp32 overflows).
    return bool(torch.isfinite(torch.stack(torch._foreach_norm(gradients, 1)).sum()))
