"""Ranges of whole rows for int8 layers of which each rank holds some input channels."""

from __future__ import annotations

from typing import Any

import comfy.ops
import torch
import torch.distributed as dist
from torch import nn

from ..module_hooks import Forward, ModuleHook, hook_names, install_hook
from ..parallel import TensorShards, all_reduce
from .quantized import INT8_LAYOUT, is_quantized

_INT8_ALIGNMENT = 16
_HOOK = "whole_row_range"
# Newer ComfyUI only: an int8 layer's product with the activation before it, past the layer's forward.
_fused_activation = getattr(comfy.ops, "linear_input_act", None)


def install_row_ranges(module: nn.Module, shards: TensorShards, group: dist.ProcessGroup) -> None:
    """Let the layers with parts of rows in int8 measure whole rows (see ``WholeRowRange``).

    For this, and for the sum over ranks, such layers must be called as modules. ComfyUI's fused feed-forward
    does that from now on; the process is a worker's.

    Args:
        module: The model, its weights whole or cut.
        shards: What this rank holds.
        group: The ranks that hold the rest.
    """
    for path, layer in module.named_modules():
        part = shards.parts.get(f"{path}.weight")
        if part is not None and part.dim == 1 and layout_of(layer) == INT8_LAYOUT:
            install_hook(layer, _HOOK, WholeRowRange(group))
            comfy.ops.linear_input_act = _call_hooked


class WholeRowRange(ModuleHook):
    """Gives an int8 layer with some input channels the range of all of them.

    The layer rounds each row of its input by the row's largest value. That of the whole row is put behind the
    rank's channels, where the weight has zeros (``cut``): the row is rounded as the whole one is, and the
    product is that of the rank's channels.

    Args:
        group: The ranks that hold the other channels.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def run(self, forward: Forward, module: nn.Module, args: tuple, kwargs: dict) -> torch.Tensor:
        """Return the layer's output for ``args[0]``, ``[..., local channels]``."""
        x, *rest = args
        largest = x.abs().amax(-1, keepdim=True)
        largest = all_reduce(largest.float(), group=self.group, op=dist.ReduceOp.MAX).to(x.dtype)
        columns = range_columns(x.shape[-1])
        return forward(torch.cat([x, largest.expand(*x.shape[:-1], columns)], -1), *rest, **kwargs)


def _call_hooked(linear: nn.Module, x: torch.Tensor, input_act: str) -> torch.Tensor:
    """Return ``linear(activation(x))``, fused as ComfyUI does it if no hook is on the layer."""
    if hook_names(linear):
        return linear(comfy.ops.INPUT_ACT_EAGER[input_act](x))
    assert _fused_activation is not None
    return _fused_activation(linear, x, input_act)


def range_columns(channels: int) -> int:
    """Return how many columns hold the range, so that the sizes stay those of the int8 kernels."""
    return _INT8_ALIGNMENT - channels % _INT8_ALIGNMENT


def layout_of(layer: nn.Module) -> str:
    """Return how a layer's weight is quantized, empty if it is not."""
    weight: Any = layer._parameters.get("weight")
    return weight._layout_cls if is_quantized(weight) else ""
