"""Proof at the start that training computes the same function as sampling does."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor, nn

from ..errors import TrainingError
from .fingerprint import plain_parts

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


def model_bytes(model: nn.Module) -> int:
    """Return the size of all parameters and buffers, those that share memory counted once."""
    sizes: dict[Hashable, int] = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        for part in plain_parts(tensor.detach()):
            place = (part.untyped_storage().data_ptr(), part.storage_offset(), part.numel())
            sizes[place] = part.numel() * part.element_size()
    return sum(sizes.values())


def check_managed_bytes(managed_bytes: int, expected_bytes: int) -> None:
    """Make sure that offloading took hold of the whole model.

    Raises:
        TrainingError: With both sizes, if a part was left out: it would fill the GPU unseen.
    """
    if managed_bytes < expected_bytes:
        raise TrainingError(
            f"offloading manages {managed_bytes} of the model's {expected_bytes} bytes; the rest would stay "
            "on the GPU or be missing there. This model is not supported with offload; switch offload off, "
            "and please report it."
        )
