"""Quantized blocks of GGUF files made numbers again, in torch operations on whatever device they lie on.

A row of a weight is a sequence of blocks, each with its scales beside its codes. What comes out is what the
package ``gguf`` computes, bit for bit: products and sums in fp32, in the same order.

Source: the formats of https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Weights are made in pieces, so that what lies between codes and numbers takes little memory.
_PIECE_WEIGHTS = 2**24
_IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


@dataclass(frozen=True)
class GgufFormat:
    """How a block is laid out.

    Attributes:
        weights: Weights of a block.
        fields: The lengths in bytes of what it consists of, in this order.
        unpack: Takes the fields, uint8 ``[blocks, length]``; returns fp32 ``[blocks, weights]``, or that in
            more dimensions.
    """

    weights: int
    fields: tuple[int, ...]
    unpack: Callable[..., Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of a block."""
        return sum(self.fields)


def dequantize(blocks: Tensor, form: str, dtypes: Sequence[torch.dtype]) -> Tensor:
    """Return the weights of quantized blocks.

    Args:
        blocks: uint8 ``[rows, bytes of a row]``, contiguous.
        form: A key of ``GGUF_FORMATS``.
        dtypes: What the fp32 values are rounded to, one after the other.

    Returns:
        ``[rows, weights of a row]`` of the last dtype, on the same device.
    """
    layout = GGUF_FORMATS[form]
    flat = blocks.reshape(-1, layout.nbytes)
    values = torch.empty((flat.shape[0], layout.weights), dtype=dtypes[-1], device=blocks.device)
    count = max(1, _PIECE_WEIGHTS // layout.weights)
    for first in range(0, flat.shape[0], count):
        piece = flat[first : first + count]
        floats = layout.unpack(*piece.split(layout.fields, dim=1)).reshape(-1, layout.weights)
        for dtype in dtypes[:-1]:
            floats = floats.to(dtype)
        values[first : first + count].copy_(floats)
    return values.reshape(blocks.shape[0], -1)


def _codes(packed: Tensor, bits: int, run: int) -> Tensor:
    """Return codes of a few bits each, uint8 ``[blocks, groups, codes of a byte, run]``.

    ``run`` neighbouring bytes hold that many codes in their lowest bits, the next ones in the bits above, and
    so on.
    """
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    groups = packed.reshape(packed.shape[0], -1, 1, run)
    return (groups >> shifts.view(-1, 1)) & (2**bits - 1)


def _halves(field: Tensor) -> Tensor:
    """Return fp16 numbers as fp32 ``[blocks, numbers]``."""
    return field.contiguous().view(torch.float16).to(torch.float32)


def _scaled(scales: Tensor, codes: Tensor, offset: int = 0) -> Tensor:
    """Return ``scales * (codes - offset)`` in fp32; each scale ``[blocks, groups]`` serves a run of codes."""
    grouped = codes.reshape(*scales.shape, -1)
    numbers = grouped.to(torch.float32).sub_(offset) if offset else grouped
    return scales.unsqueeze(-1) * numbers


def _q4_0(scale: Tensor, low: Tensor) -> Tensor:
    return _scaled(_halves(scale), _codes(low, 4, 16), 8)


def _q4_1(scale: Tensor, least: Tensor, low: Tensor) -> Tensor:
    return _scaled(_halves(scale), _codes(low, 4, 16)).add_(_halves(least).unsqueeze(-1))


def _q5_0(scale: Tensor, high: Tensor, low: Tensor) -> Tensor:
    return _scaled(_halves(scale), _joined(_codes(low, 4, 16), _codes(high, 1, 1)), 16)


def _q5_1(scale: Tensor, least: Tensor, high: Tensor, low: Tensor) -> Tensor:
    codes = _joined(_codes(low, 4, 16), _codes(high, 1, 1))
    return _scaled(_halves(scale), codes).add_(_halves(least).unsqueeze(-1))


def _q8_0(scale: Tensor, codes: Tensor) -> Tensor:
    return _scaled(_halves(scale), codes.view(torch.int8))


def _joined(low: Tensor, high: Tensor, low_bits: int = 4) -> Tensor:
    """Return codes put together from their lower and upper bits, uint8 ``[blocks, codes]``."""
    return low.flatten(1) | (high.flatten(1) << low_bits)


def _q2_k(parts: Tensor, low: Tensor, scale: Tensor, least: Tensor) -> Tensor:
    scales = _halves(scale) * (parts & 15)
    minima = _halves(least) * (parts >> 4)
    return _scaled(scales, _codes(low, 2, 32)).sub_(minima.unsqueeze(-1))


def _q3_k(high: Tensor, low: Tensor, parts: Tensor, scale: Tensor) -> Tensor:
    multiples = _joined(_codes(parts[:, :8], 4, 8), _codes(parts[:, 8:], 2, 4))
    scales = _halves(scale) * multiples.to(torch.float32).sub_(32)
    return _scaled(scales, _joined(_codes(low, 2, 32), _codes(high, 1, 32), 2), 4)


def _k_scales(parts: Tensor) -> tuple[Tensor, Tensor]:
    """Return the eight 6-bit multiples for scales and those for minima; the last four of each are split."""
    first, second, rest = parts.split(4, dim=1)
    scales = torch.cat((first & 63, (rest & 15) | ((first >> 6) << 4)), dim=1)
    minima = torch.cat((second & 63, (rest >> 4) | ((second >> 6) << 4)), dim=1)
    return scales, minima


def _q4_k(scale: Tensor, least: Tensor, parts: Tensor, low: Tensor) -> Tensor:
    return _with_minima(scale, least, parts, _codes(low, 4, 32))


def _q5_k(scale: Tensor, least: Tensor, parts: Tensor, high: Tensor, low: Tensor) -> Tensor:
    return _with_minima(scale, least, parts, _joined(_codes(low, 4, 32), _codes(high, 1, 32)))


def _with_minima(scale: Tensor, least: Tensor, parts: Tensor, codes: Tensor) -> Tensor:
    scales, minima = _k_scales(parts)
    return _scaled(_halves(scale) * scales, codes).sub_((_halves(least) * minima).unsqueeze(-1))


def _q6_k(low: Tensor, high: Tensor, parts: Tensor, scale: Tensor) -> Tensor:
    codes = _joined(_codes(low, 4, 64), _codes(high, 2, 32))
    return _scaled(_halves(scale) * parts.view(torch.int8), codes, 32)


def _iq4_nl(scale: Tensor, low: Tensor) -> Tensor:
    return _scaled(_halves(scale), _iq4_values(_codes(low, 4, 16)))


def _iq4_xs(scale: Tensor, high_parts: Tensor, low_parts: Tensor, low: Tensor) -> Tensor:
    multiples = _joined(_codes(low_parts, 4, 1), _codes(high_parts, 2, 1))
    scales = _halves(scale) * multiples.to(torch.float32).sub_(32)
    return _scaled(scales, _iq4_values(_codes(low, 4, 16)))


def _iq4_values(codes: Tensor) -> Tensor:
    # Made by kernels alone: a copy from the host could not be recorded in a CUDA graph.
    shifts = torch.arange(0, 64, 8, device=codes.device)
    halves = [
        int.from_bytes(bytes(value + 128 for value in half), "little", signed=True)
        for half in (_IQ4_VALUES[:8], _IQ4_VALUES[8:])
    ]
    table = torch.cat([(torch.full_like(shifts, half) >> shifts) & 255 for half in halves])
    return table.to(torch.float32).sub_(128)[codes.to(torch.int32)]


GGUF_FORMATS: dict[str, GgufFormat] = {
    "Q4_0": GgufFormat(32, (2, 16), _q4_0),
    "Q4_1": GgufFormat(32, (2, 2, 16), _q4_1),
    "Q5_0": GgufFormat(32, (2, 4, 16), _q5_0),
    "Q5_1": GgufFormat(32, (2, 2, 4, 16), _q5_1),
    "Q8_0": GgufFormat(32, (2, 32), _q8_0),
    "Q2_K": GgufFormat(256, (16, 64, 2, 2), _q2_k),
    "Q3_K": GgufFormat(256, (32, 64, 12, 2), _q3_k),
    "Q4_K": GgufFormat(256, (2, 2, 12, 128), _q4_k),
    "Q5_K": GgufFormat(256, (2, 2, 12, 32, 128), _q5_k),
    "Q6_K": GgufFormat(256, (128, 64, 16, 2), _q6_k),
    "IQ4_NL": GgufFormat(32, (2, 16), _iq4_nl),
    "IQ4_XS": GgufFormat(256, (2, 2, 4, 128), _iq4_xs),
}
