"""Weights in GGUF's quantized blocks, at random, and tiny MODELs that hold them."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import nn

from .tiny_patchers import PATCHERS

# Which fields of a block are fp16 numbers: what the codes are multiplied with, and minima.
SCALES = {
    "Q4_0": (0,), "Q4_1": (0, 1), "Q5_0": (0,), "Q5_1": (0, 1), "Q8_0": (0,), "Q2_K": (2, 3), "Q3_K": (3,),
    "Q4_K": (0, 1), "Q5_K": (0, 1), "Q6_K": (3,), "IQ4_NL": (0,), "IQ4_XS": (0,),
}  # fmt: skip
FORMS = tuple(SCALES)


def random_weight(form: str, rows: int, columns: int, *, seed: int, size: float = 0.05) -> torch.Tensor:
    """Return a ``PackedWeight`` in bf16 of values of about the given size."""
    from comfyui_ferry.core.offload import GGUF_FORMATS, PackedWeight

    layout = GGUF_FORMATS[form]
    draw = torch.Generator().manual_seed(seed)
    count = rows * columns // layout.weights
    fields = [
        torch.randint(0, 256, (count, nbytes), generator=draw, dtype=torch.uint8) for nbytes in layout.fields
    ]

    def scaled(scale: float) -> torch.Tensor:
        for index in SCALES[form]:
            numbers = scale * (0.5 + torch.rand(count, 1, generator=draw))
            fields[index] = numbers.to(torch.float16).view(torch.uint8)
        return torch.cat(fields, dim=1).view(rows, -1)

    raw = PackedWeight(scaled(1.0), form, (torch.float32,)).dense()
    return PackedWeight(scaled(size / float(raw.std())), form, (torch.bfloat16,))


def packed_pair(kind: str, **changes: Any) -> tuple[Any, Any]:
    """Return two equal MODELs: with packed weights where a Linear's width allows it, and with dense ones.

    Args:
        kind: Of ``PATCHERS``.
        changes: Of the network's configuration.
    """
    from comfyui_ferry.core.offload import GGUF_FORMATS

    pair = packed, dense = tuple(PATCHERS[kind].build(**changes) for _ in range(2))
    forms = {
        width: itertools.cycle([form for form in FORMS if GGUF_FORMATS[form].weights == width])
        for width in (32, 256)
    }
    with torch.inference_mode():
        for number, (path, layer) in enumerate(packed.model.diffusion_model.named_modules()):
            if not isinstance(layer, nn.Linear) or layer.in_features % 32:
                continue
            form = next(forms[32 if layer.in_features % 256 else 256])
            weight: Any = random_weight(form, layer.out_features, layer.in_features, seed=number)
            weight = weight.to(layer.weight.dtype)
            layer.weight = nn.Parameter(weight, requires_grad=False)
            other: Any = dense.model.diffusion_model.get_submodule(path)
            other.weight = nn.Parameter(weight.dense(), requires_grad=False)
    return pair
