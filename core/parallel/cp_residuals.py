"""ControlNet residuals of diffusers' models: lists of ``[B, S, C]`` that ``_cp_plan`` dictionaries leave out.

The models add them to their image tokens block by block, so a rank needs its own rows of them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from ..errors import PlanError
from .arguments import named_slots

_SUFFIX = "_block_samples"
_TOKENS = "hidden_states"


def split_residuals(
    forward: Callable[..., Any], args: tuple, kwargs: dict, part: Callable[[torch.Tensor, int], torch.Tensor]
) -> tuple[tuple, dict]:
    """Return a call with this rank's rows of the residuals in it, if it has any.

    Args:
        forward: The model.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.
        part: Returns this rank's rows of a whole tensor at a dim.

    Raises:
        PlanError: If a residual has not one row for each image token.
    """
    called = forward.forward if isinstance(forward, torch.nn.Module) else forward
    slots = named_slots(inspect.signature(called))
    tokens = slots[_TOKENS].read(args, kwargs) if _TOKENS in slots else None
    for name, slot in slots.items():
        residuals = slot.read(args, kwargs) if name.endswith(_SUFFIX) else None
        if residuals is None:
            continue
        rows = None if tokens is None else tokens.shape[1]
        shapes = [tuple(residual.shape) for residual in residuals]
        if any(len(shape) != 3 or shape[1] != rows for shape in shapes):
            raise PlanError(f"{name} has the shapes {shapes}, but there are {rows} rows of {_TOKENS}")
        args, kwargs = slot.replace(args, kwargs, [part(residual, 1) for residual in residuals])
    return args, kwargs
