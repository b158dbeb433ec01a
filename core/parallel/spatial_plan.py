"""The vocabulary of spatial plans: how a convolutional decoder is cut over ranks, as data.

A picture is cut into strips along its height or width. Pointwise layers need nothing; the others are named
here by what they see of their neighbours. A class that a plan does not name is refused, since it could mix
rows in a way that nobody has looked at.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..errors import RequestError
from ..module_paths import find_modules


class SpatialRole(enum.Enum):
    """What a module class does along the cut dim.

    ``POINTWISE``: each row by itself, or nothing but calling other modules; it may repeat every row (nearest
    upsampling) or unfold channels into rows. ``CONVOLUTION``: a window of ``kernel_size`` rows around each
    one, with whatever the class pads at the borders. ``GROUP_NORM``: statistics over all rows.
    ``ATTENTION``: every row attends to all rows, by the function that the module holds as
    ``optimized_attention``. ``PADDED``: it holds a convolution as ``conv`` whose input it, or whoever calls
    it, has padded by the rows that the convolution sees. ``PADDED_CONVOLUTION``: that convolution; no class
    of a plan has this role.
    """

    POINTWISE = "pointwise"
    CONVOLUTION = "convolution"
    PADDED = "padded"
    PADDED_CONVOLUTION = "padded convolution"
    GROUP_NORM = "group norm"
    ATTENTION = "attention"


@dataclass(frozen=True)
class SpatialPlan:
    """One autoencoder class.

    Args:
        name: For people.
        class_path: Dotted path of the autoencoder's class.
        decoder_path: Dotted path of its decoder's class; some autoencoder classes hold different ones.
        parts: Paths of the modules that ``decode`` runs; those not there are skipped.
        roles: Role of every module class inside the parts, by dotted path.
        cache_arguments: Names of two arguments of convolutions, a list of tensors of earlier frames and the
            index of the one that the call takes out of it; empty if there are none.
        chunk_limit: Name of a method of ``decoder`` whose last argument bounds the bytes of the frames
            decoded at once; empty, or no such method: it does not look at sizes.
        draws_noise: Whether decoding draws random numbers.
    """

    name: str
    class_path: str
    decoder_path: str
    parts: tuple[str, ...]
    roles: Mapping[str, SpatialRole]
    cache_arguments: tuple[str, str] | tuple[()] = ()
    chunk_limit: str = ""
    draws_noise: bool = False


def dotted_path(module: nn.Module) -> str:
    """Return the dotted path of a module's class."""
    return f"{type(module).__module__}.{type(module).__qualname__}"


def planned_modules(model: nn.Module, plan: SpatialPlan) -> list[tuple[str, nn.Module, SpatialRole]]:
    """Return path, module and role of every module inside the plan's parts.

    Raises:
        RequestError: If one is of a class that the plan does not name, or is a convolution that cannot be
            cut (a stride, an even window).
    """
    found = []
    for part in plan.parts:
        if getattr(model, part, None) is None:
            continue
        for path, root in find_modules(model, part):
            padded: set[str] = set()
            for name, module in root.named_modules(prefix=path):
                role = plan.roles.get(dotted_path(module))
                if role is None:
                    raise _refusal(plan, name, f"is a {dotted_path(module)}, which the plan does not name")
                if role is SpatialRole.PADDED:
                    padded.add(f"{name}.conv")
                elif role is SpatialRole.CONVOLUTION:
                    role = SpatialRole.PADDED_CONVOLUTION if name in padded else role
                    _check_convolution(plan, name, module, is_padded=name in padded)
                found.append((name, module, role))
    return found


def window_radius(module: nn.Module, dim: int) -> int:
    """Return how many rows a convolution sees on each side of a row.

    Args:
        module: A convolution.
        dim: -2 for height, -1 for width.
    """
    (kernel, dilation) = (getattr(module, name)[dim] for name in ("kernel_size", "dilation"))
    return dilation * (kernel - 1) // 2


def _check_convolution(plan: SpatialPlan, path: str, module: nn.Module, *, is_padded: bool) -> None:
    for dim in (-2, -1):
        kernel, stride = (getattr(module, name)[dim] for name in ("kernel_size", "stride"))
        if stride != 1 or kernel % 2 == 0:
            raise _refusal(plan, path, f"has stride {stride} and a window of {kernel} rows")
        padding: Any = module.padding
        if is_padded and (padding[dim] or window_radius(module, dim) > 1):
            raise _refusal(plan, path, f"pads by {padding[dim]} what was padded before, for {kernel} rows")


def _refusal(plan: SpatialPlan, path: str, what: str) -> RequestError:
    return RequestError(
        f"parallel decoding by the plan {plan.name} was asked, but {path} {what}",
        limit="Each layer must be one whose rows are known to be cut exactly",
        way_out="Decode with this VAE on one GPU",
    )
