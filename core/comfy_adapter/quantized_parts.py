"""Parts of quantized weights: which weights ranks may share, and how a part is cut with its scales.

A part holds the stored values and scales of the whole, moved, never quantized again. What a rank multiplies
must also be what the whole multiplies, so the quantization of a layer's *input* decides too:

- scaled fp8: one scale for the weight, a fixed one for inputs. Any cut.
- int8: a scale for the weight or for each output channel, and one for each row of the input. A rank that has
  a part of the input channels sees a part of each row, so ranks agree on the largest value first
  (``row_ranges``).
- mxfp8 and nvfp4: a scale for each run of 32 or 16 input channels, of the weight and of the input. Input
  channels are cut between runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ..errors import RequestError
from ..offload import PackedWeight
from ..parallel import (
    ModelPlan,
    TensorPart,
    TensorShards,
    input_name,
    join_pieces,
    max_tensor_degree,
)
from . import packed_weights
from .quantized import INT8_LAYOUT, MXFP8_LAYOUT, NVFP4_LAYOUT, is_mixed_linear, is_quantized, scales_of
from .row_ranges import layout_of, range_columns

# Products of fp8 take sizes that are multiples of it (torch.nn.functional.scaled_mm).
_FP8_ALIGNMENT = 16
Join = Callable[[Sequence[torch.Tensor], int], torch.Tensor]


@dataclasses.dataclass(frozen=True)
class _Blocks:
    """How a layout keeps scales of blocks.

    Args:
        scales: Field with the scales, in the tiles that cuBLAS reads.
        length: Input channels that share one; stored sizes are padded to multiples of it.
        per_byte: Values in one stored byte.
    """

    scales: str
    length: int
    per_byte: int


_BLOCKS = {MXFP8_LAYOUT: _Blocks("scale", 32, 1), NVFP4_LAYOUT: _Blocks("block_scale", 16, 2)}


def max_cut(module: nn.Module, plan: ModelPlan, *, most: int) -> int:
    """Return how many ranks, up to ``most``, may hold parts of a model's weights."""
    if find_uncuttable(module) is not None:
        return 1
    most = min(most, max_tensor_degree(module, plan))
    return next((tp - 1 for tp in range(2, most + 1) if find_unaligned(module, plan, tp) is not None), most)


def find_uncuttable(module: nn.Module) -> str | None:
    """Return which weight cannot be held in parts for how it is quantized, and why; None if there is none."""
    for path, layer in module.named_modules():
        weight: Any = layer._parameters.get("weight")
        for name, parameter in layer._parameters.items() if is_mixed_linear(layer) else ():
            if name not in ("weight", "bias") and parameter is not None and parameter.numel() > 1:
                return f"{path}.{name} holds a value for each channel"
        if not is_quantized(weight):
            continue
        if not is_mixed_linear(layer):
            return f"{path}.weight is quantized, but a {type(layer).__name__}"
        layout, scale = weight._layout_cls, weight._params.scale
        if getattr(weight._params, "convrot", False):
            return f"{path}.weight is a {layout} that is rotated in groups of channels (ConvRot)"
        counts = {INT8_LAYOUT: (1, weight.shape[0]), MXFP8_LAYOUT: (scale.numel(),)}.get(layout, (1,))
        if scale.numel() not in counts:
            return f"{path}.weight is a {layout} with several scales"
    return None


def find_unaligned(module: nn.Module, plan: ModelPlan, degree: int) -> str | None:
    """Return which weight would be cut where its form does not allow it, and why; None if there is none.

    Args:
        module: The model.
        plan: The plan of its class.
        degree: Ranks that share its weights.
    """
    layers = {
        path: layer for path, layer in module.named_modules() if layout_of(layer) not in ("", INT8_LAYOUT)
    }
    for rank in range(degree) if layers else ():
        parts = TensorShards(module, plan, degree=degree, rank=rank).parts
        for path, layer in layers.items():
            part = parts.get(f"{path}.weight")
            misfit = None if part is None else _misfit(layer, part)
            if misfit is not None:
                return f"{path}.weight {misfit}"
    return None


def find_unscaled(module: nn.Module) -> str | None:
    """Return which layer measures its whole input in one number, and why; None if there is none."""
    for path, layer in module.named_modules():
        if layout_of(layer) != NVFP4_LAYOUT or not _multiplies(layer):
            continue
        if getattr(layer, "input_scale", None) is None:
            return f"{path}.weight is a {NVFP4_LAYOUT} without an input scale"
    return None


def check_sharing(module: nn.Module, *, plan: ModelPlan, tensor_degree: int) -> None:
    """Check that sharing the work of a model among ranks changes none of its numbers.

    Args:
        module: The diffusion model.
        plan: The plan of its class.
        tensor_degree: Ranks that share its weights.

    Raises:
        RequestError: Naming the weight and its layout.
    """
    uncut = find_uncuttable(module) if tensor_degree > 1 else None
    if uncut is not None:
        raise RequestError(
            f"{input_name('tp')} above 1 was asked, but {uncut}",
            limit="Weights in scaled fp8, int8, mxfp8 and nvfp4 can be cut",
            way_out=f"Set {input_name('tp')} to 1, or load an fp8 or unquantized file",
        )
    unaligned = find_unaligned(module, plan, tensor_degree) if tensor_degree > 1 else None
    if unaligned is not None:
        raise RequestError(
            f"{input_name('tp')}={tensor_degree} was asked, but {unaligned}",
            limit=f"GPUs multiply fp8 in multiples of {_FP8_ALIGNMENT} channels, mxfp8 and nvfp4 in runs "
            "with one scale, and heads stay whole",
            way_out=f"Set {input_name('tp')} so that every worker's heads have such a width, or load an "
            "unquantized file",
        )
    unscaled = find_unscaled(module)
    if unscaled is not None:
        raise RequestError(
            f"parallel sampling was asked, but {unscaled}",
            limit="Its layer measures all tokens together, and each worker would see a part of them",
            way_out="Load a file with input scales, or an fp8 or unquantized file",
        )


def cut(tensor: torch.Tensor, part: TensorPart, *, join: Join = join_pieces) -> torch.Tensor | None:
    """Return a rank's part of a parameter, quantized or not; None if it holds none of it.

    Args:
        tensor: The whole parameter.
        part: What the rank holds.
        join: Makes one tensor of pieces of stored values, in the given dim.
    """
    if not part.ranges:
        return None
    if isinstance(tensor, PackedWeight):
        return packed_weights.cut(tensor, part, join)
    if not is_quantized(tensor):
        return join(part.pieces(tensor), part.dim)
    weight: Any = tensor
    if weight._layout_cls in _BLOCKS:
        return _cut_blocks(weight, part, _BLOCKS[weight._layout_cls], join)
    pieces, scales = part.pieces(weight._qdata), scales_of(weight)
    if weight._layout_cls == INT8_LAYOUT and part.dim == 1:
        pieces.append(weight._qdata.new_zeros(len(weight._qdata), range_columns(part.local_size)))
    elif part.dim == 0:
        scales = {name: _rows_of(scale, part) for name, scale in scales.items()}
    values = join(pieces, part.dim)
    return _rebuilt(weight, values, tuple(values.shape), scales)


def _multiplies(layer: nn.Module) -> bool:
    """Return whether a layer multiplies quantized values; else it computes with plain ones."""
    return not getattr(layer, "_full_precision_mm", False)


def _misfit(layer: nn.Module, part: TensorPart) -> str | None:
    """Return why a weight of scaled fp8, mxfp8 or nvfp4 cannot be cut in this way; None if it can."""
    blocks = _BLOCKS.get(layout_of(layer))
    if blocks is None:
        if _multiplies(layer) and part.local_size % _FP8_ALIGNMENT and not part.size % _FP8_ALIGNMENT:
            return f"would be cut to {part.local_size} of its {part.size} channels"
        return None
    for edge in _edges(part) if part.dim == 1 else ():
        if edge % blocks.length:
            return f"would be cut at channel {edge}, inside a run of {blocks.length} that share a scale"
    return None


def _edges(part: TensorPart) -> Iterator[int]:
    """Yield the channels at which a part begins or ends; the end of the whole is none if it comes last."""
    for start, stop in part.ranges:
        yield start
        if stop < part.size or stop != part.ranges[-1][1]:
            yield stop


def _cut_blocks(weight: Any, part: TensorPart, blocks: _Blocks, join: Join) -> torch.Tensor:
    """Return a part of a weight whose scales belong to blocks and stand in cuBLAS's tiles."""
    from comfy_kitchen.float_utils import from_blocked, to_blocked  # newer ComfyUI only

    rows, channels = weight._params.orig_shape
    whole = getattr(weight._params, blocks.scales)
    scales = from_blocked(whole.view(torch.uint8), rows, -(-channels // blocks.length))
    whole_values = weight._qdata.view(torch.uint8)[:rows, : -(-channels // blocks.per_byte)]
    stored_part = _in_units(part, blocks.per_byte)
    scales = _in_units(part, blocks.length).take(scales)
    assert scales is not None
    shape = (part.local_size, channels) if part.dim == 0 else (rows, part.local_size)
    # Rows and channels are stored in multiples of the block; the zeros beyond the weight are cut off again.
    stored = [-(-size // blocks.length) * blocks.length for size in shape]
    stored[1] //= blocks.per_byte
    size = [part.local_size, whole_values.shape[1]] if part.dim == 0 else [rows, stored_part.local_size]
    pieces = stored_part.pieces(whole_values)
    if size == stored:
        values = join(pieces, part.dim)
    else:
        missing = (0, stored[1] - size[1], 0, stored[0] - size[0])
        values = functional.pad(join_pieces(pieces, part.dim), missing)
    tiles = to_blocked(scales, flatten=False).view(whole.dtype)
    return _rebuilt(
        weight, values.view(weight._qdata.dtype), shape, scales_of(weight) | {blocks.scales: tiles}
    )


def _in_units(part: TensorPart, channels: int) -> TensorPart:
    """Return the part of a tensor that has one column for so many input channels."""
    if part.dim == 0:
        return part
    ranges = tuple((start // channels, -(-stop // channels)) for start, stop in part.ranges)
    return TensorPart(1, -(-part.size // channels), ranges)


def _rows_of(scale: torch.Tensor, part: TensorPart) -> torch.Tensor:
    rows = part.take(scale) if scale.numel() > 1 else scale
    assert rows is not None
    return rows


def _rebuilt(
    weight: Any, values: torch.Tensor, shape: tuple[int, ...], scales: dict[str, torch.Tensor]
) -> torch.Tensor:
    scales = {name: scale.contiguous() for name, scale in scales.items()}
    params = dataclasses.replace(weight._params, orig_shape=shape, **scales)
    return type(weight)(values.contiguous(), weight._layout_cls, params)
