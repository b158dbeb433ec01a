"""Proof at the start that training computes the same function as sampling does."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import TrainingError

# The two runs use the same kernels on the same inputs and differ at most by a reordered addition; a
# broken rewrite (an update that something else was meant to see) is off by tens of percent.
_TOLERANCE = 1e-3


def check_same_output(expected: Tensor, actual: Tensor, *, what: str) -> None:
    """Compare the denoiser's output with and without a change that must not change it.

    Args:
        expected: The model as it samples.
        actual: The model as it trains, adapters at zero; the same shape.
        what: Names the change in the error.

    Raises:
        TrainingError: If they differ by more than rounding.
    """
    error = float(torch.linalg.vector_norm((actual - expected).float()))
    size = float(torch.linalg.vector_norm(expected.float()))
    if not error <= _TOLERANCE * size:
        raise TrainingError(
            f"{what} changes the model's output by {error / max(size, 1e-30):.2%}, so training would learn "
            "for another model than the one that samples. This model is not supported; please report it."
        )
