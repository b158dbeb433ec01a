"""An exponential moving average of the trained weights: less noise than the last step's own."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn


class MovingAverage:
    """fp32 averages beside the parameters, on their devices.

    Args:
        parameters: By name.
        decay: In (0, 1): how much of the average is kept each step. The first steps keep less,
            ``(1 + n) / (10 + n)`` after ``n`` of them, so that the start values fade quickly.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], *, decay: float) -> None:
        self.parameters = dict(parameters)
        self.decay = decay
        self.values: dict[str, Tensor] = {
            name: parameter.detach().float().clone() for name, parameter in self.parameters.items()
        }

    def update(self, steps: int) -> None:
        """Take in the parameters as they are after ``steps`` optimizer steps (at least 1)."""
        decay = min(self.decay, (1 + steps) / (10 + steps))
        averages = list(self.values.values())
        present = [self.parameters[name].detach().float() for name in self.values]
        torch._foreach_lerp_(averages, present, 1 - decay)

    def load(self, values: Mapping[str, Tensor]) -> None:
        """Continue from saved averages."""
        for name, value in self.values.items():
            value.copy_(values[name])

    def apply(self) -> None:
        """Write the averages to the parameters."""
        with torch.no_grad():
            for name, value in self.values.items():
                self.parameters[name].copy_(value)
