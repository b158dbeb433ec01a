"""ControlNet residuals in a call of a diffusers model; whole models are in ``test_cp_plan.py``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from comfyui_ferry.core.errors import PlanError
from comfyui_ferry.core.parallel.cp_residuals import split_residuals


def forward(hidden_states: Any, controlnet_block_samples: Any = None, scale: float = 1.0) -> None:
    """Takes what models of diffusers take."""


def first_half(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    return tensor.narrow(dim, 0, tensor.shape[dim] // 2)


def test_residuals_are_cut_as_the_tokens_wherever_they_are_passed() -> None:
    tokens, residual = torch.randn(1, 6, 2), torch.randn(1, 6, 2)
    args, kwargs = split_residuals(forward, (tokens, (residual,)), {"scale": 0.5}, first_half)
    assert args[0] is tokens and torch.equal(args[1][0], residual[:, :3]) and kwargs == {"scale": 0.5}
    call = {"hidden_states": tokens, "controlnet_block_samples": [residual, residual]}
    _, kwargs = split_residuals(forward, (), call, first_half)
    assert [tuple(each.shape) for each in kwargs["controlnet_block_samples"]] == [(1, 3, 2)] * 2
    assert split_residuals(forward, (tokens,), {}, first_half) == ((tokens,), {})


def test_residuals_with_other_rows_are_refused_by_name() -> None:
    with pytest.raises(
        PlanError, match=r"controlnet_block_samples has the shapes \[\(1, 5, 2\)\], .* 6 rows"
    ):
        split_residuals(forward, (torch.randn(1, 6, 2), [torch.randn(1, 5, 2)]), {}, first_half)
