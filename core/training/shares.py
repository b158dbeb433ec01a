"""Data-parallel training: other devices compute a part of each optimizer step's micro-steps.

A step keeps its micro-steps, whoever computes them: with ``n`` devices each takes ``1/n`` of them, and the
gradients are added up before the step. So a training is the same on one device and on many, up to the
order of additions, and may be gone on with on another number of them (synchronous data parallelism, as
in PyTorch Distributed, arXiv:2006.15704).

What this module does not do: it knows no process; see ``Helpers``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor, nn

from ..errors import RequestError, TrainingError
from .data import Batch
from .nan_guard import Trouble

# Another process runs the same kernels on the same values; another GPU model may round otherwise, bf16 by
# up to 2**-8 a layer. A wrong weight or input is off by far more.
_TOLERANCE = 0.02


@dataclass(frozen=True)
class MicroStep:
    """One micro-step to be computed elsewhere.

    Attributes:
        number: Its place in the whole training, which decides the random numbers.
        batches: Its samples.
    """

    number: int
    batches: list[Batch]


@dataclass(frozen=True)
class Share:
    """What the helpers give for a step.

    Attributes:
        gradients: Their sum, by the parameter's name, on the host; absent where no pass gave one.
        losses: For each helper, the losses of its micro-steps, already divided as in the step's mean.
        trouble: What was not finite, if anything; there are no gradients then.
    """

    gradients: Mapping[str, Tensor] = field(default_factory=dict)
    losses: list[list[float]] = field(default_factory=list)
    trouble: Trouble | None = None


class Helpers(Protocol):
    """Other devices with the same model and adapters."""

    @property
    def count(self) -> int:
        """How many there are besides the one that asks."""
        ...

    def start(self, parameters: Mapping[str, nn.Parameter], shares: Sequence[Sequence[MicroStep]]) -> None:
        """Let helper ``i`` compute ``shares[i]`` with these values of the parameters, and return at once."""
        ...

    def finish(self) -> Share:
        """Wait for what was started."""
        ...


def check_shares(accumulation_steps: int, *, num_devices: int) -> None:
    """Refuse a number of micro-steps that cannot be shared out evenly.

    Raises:
        RequestError: Naming numbers that can.
    """
    if num_devices < 1:
        raise RequestError(
            f"gpus={num_devices} was asked", limit="It must be at least 1", way_out="Set gpus to 1 or more"
        )
    if accumulation_steps % num_devices:
        above = -(-accumulation_steps // num_devices) * num_devices
        raise RequestError(
            f"gpus={num_devices} was asked with grad_accumulation_steps={accumulation_steps}",
            limit="The GPUs share the forward passes of each step, the same number each, so that more GPUs "
            "change the speed and not the result",
            way_out=f"Set grad_accumulation_steps to {above} or another multiple of {num_devices}, or gpus "
            "to a divisor of it",
        )


def share_out(first: int, accumulation_steps: int, *, num_devices: int) -> list[range]:
    """Return the numbers of each device's micro-steps; the asking device has the first of them."""
    each = accumulation_steps // num_devices
    return [range(first + index * each, first + (index + 1) * each) for index in range(num_devices)]


def add_gradients(parameters: Mapping[str, nn.Parameter], gradients: Mapping[str, Tensor]) -> None:
    """Add what the helpers found to the parameters' own gradients."""
    for name, gradient in gradients.items():
        parameter = parameters[name]
        moved = gradient.to(parameter.device, parameter.dtype).view_as(parameter)
        if parameter.grad is None:
            parameter.grad = moved.clone()
        else:
            parameter.grad += moved


def check_first_losses(expected: Sequence[float], found: Sequence[Sequence[float]]) -> None:
    """Make sure that helpers compute what this process does.

    Args:
        expected: The loss of each helper's first micro-step, computed here; empty if it was not.
        found: Each helper's losses.

    Raises:
        TrainingError: If one differs by more than rounding.
    """
    for device, (here, there) in enumerate(zip(expected, found, strict=False), start=2):
        if not abs(there[0] - here) <= _TOLERANCE * abs(here):
            raise TrainingError(
                f"GPU {device} of this training finds a loss of {there[0]:.6g} where the first one finds "
                f"{here:.6g}, so its part of the gradients would be wrong. Set gpus to 1, and please "
                "report it."
            )
