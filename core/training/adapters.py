"""What is trained on one Linear layer: LoRA, DoRA, LoKr or LoHa.

Each holds fp32 masters, computes in the dtype of its input, and gives exactly the bare layer at its
start. The layer itself is called as usual, so its weight may be streamed, cast or quantized. The
formulas are those with which ComfyUI's loader merges the files, so a LoRA samples as it was trained.

Sources: LoRA arXiv:2106.09685; DoRA arXiv:2402.09353; LoKr and LoHa (LyCORIS) arXiv:2309.14859, the
latter after FedPara arXiv:2108.06098.

Shapes: ``out`` and ``in`` are the layer's widths, ``r`` the rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..errors import RequestError
from ..offload import PackedWeight

_ROWS_AT_ONCE = 1024
# The Kronecker product's first factor has at most so many rows and columns.
_LOKR_FACTOR = 8


class Adapter(nn.Module):
    """One adapter.

    Attributes:
        file_names: What each parameter is called in a file, after the layer's path; its own name if not here.
        zero: The parameter that is zero at the start; as long as it is, no other one gets a gradient.

    Args:
        in_features: Width of the layer's input.
        out_features: Width of its output.
        rank: Inner width ``r``.
        alpha: The addition is scaled by ``alpha / rank``.
    """

    file_names: Mapping[str, str] = {}
    zero: str = ""

    def __init__(self, in_features: int, out_features: int, *, rank: int, alpha: float) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.rank, self.scale = rank, alpha / rank

    def add_bias(self) -> None:
        """Train an addition to the layer's bias too; zero at the start."""
        self.diff_b = nn.Parameter(torch.zeros(self.out_features))

    def start(self, random: torch.Generator, layer: nn.Module) -> None:
        """Draw the start values on the host; ``layer`` is where it will sit."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """Return the addition ``(..., out)`` to the layer's output for its input ``x`` ``(..., in)``."""
        raise NotImplementedError

    def around(self, forward: Callable[[Tensor], Tensor], layer: nn.Module, x: Tensor) -> Tensor:
        """Return the layer's output with the adapter; ``forward`` is the layer's own."""
        output = forward(x)
        # Not in place: the output may be a view or saved for the layer's own backward.
        output = output + self(x).to(output.dtype)
        bias = self._parameters.get("diff_b")
        return output if bias is None else output + bias.to(output.dtype)

    def zero_parameter(self) -> nn.Parameter:
        """Return the parameter named by ``zero``."""
        return self.get_parameter(self.zero)


class LoraAdapter(Adapter):
    """``scale * up @ down``.

    Attributes:
        lora_down: ``(r, in)``, Kaiming-uniform at the start.
        lora_up: ``(out, r)``, zero at the start.
    """

    file_names: Mapping[str, str] = {"lora_up": "lora_up.weight", "lora_down": "lora_down.weight"}
    zero = "lora_up"

    def __init__(self, in_features: int, out_features: int, *, rank: int, alpha: float) -> None:
        super().__init__(in_features, out_features, rank=rank, alpha=alpha)
        self.lora_down = nn.Parameter(torch.empty(rank, in_features))
        self.lora_up = nn.Parameter(torch.zeros(out_features, rank))

    def start(self, random: torch.Generator, layer: nn.Module) -> None:
        """Draw ``lora_down``."""
        nn.init.kaiming_uniform_(self.lora_down, a=math.sqrt(5), generator=random)

    def forward(self, x: Tensor) -> Tensor:
        """Return the addition."""
        low = F.linear(x, self.lora_down.to(x.dtype))
        return F.linear(low, self.lora_up.to(x.dtype)) * self.scale


class DoraAdapter(LoraAdapter):
    """A LoRA whose result keeps a trained length in each column of the weight.

    The weight becomes ``V * dora_scale / norm(V)`` with ``V = W + scale * up @ down`` and norms over
    columns, as ComfyUI merges it. Scaling columns is scaling the input, so the layer is still called as
    usual. The norm takes no part in the gradient (section 4.3 of the paper).

    Attributes:
        dora_scale: ``(1, in)``, at the start the norms of the layer's weight.
    """

    file_names: Mapping[str, str] = {**LoraAdapter.file_names, "dora_scale": "dora_scale"}

    def __init__(self, in_features: int, out_features: int, *, rank: int, alpha: float) -> None:
        super().__init__(in_features, out_features, rank=rank, alpha=alpha)
        self.dora_scale = nn.Parameter(torch.empty(1, in_features))

    def start(self, random: torch.Generator, layer: nn.Module) -> None:
        """Draw ``lora_down`` and measure the layer's weight."""
        super().start(random, layer)
        with torch.no_grad():
            self.dora_scale.copy_(self._norms(_plain_weight(layer)))

    def around(self, forward: Callable[[Tensor], Tensor], layer: nn.Module, x: Tensor) -> Tensor:
        """Return the layer's output for the scaled input, with the LoRA."""
        with torch.no_grad():
            norms = self._norms(_plain_weight(layer))
        # The factors are close to one, where half precision has few digits.
        change = (self.dora_scale / norms - 1)[0].to(x.dtype)
        return super().around(forward, layer, x + x * change)

    def _norms(self, weight: Tensor) -> Tensor:
        """Return the norms of the columns of ``W + scale * up @ down``, ``(1, in)`` fp32."""
        total = torch.zeros(self.in_features, device=weight.device)
        for first in range(0, self.out_features, _ROWS_AT_ONCE):
            rows = slice(first, first + _ROWS_AT_ONCE)
            part = weight[rows].float()
            part = part + self.scale * (self.lora_up[rows] @ self.lora_down).to(part.device)
            total += part.square().sum(dim=0)
        return (total.sqrt() + torch.finfo(torch.float32).eps)[None]


class LokrAdapter(Adapter):
    """A Kronecker product: ``kron(w1, w2)``, with ``w2`` whole or ``scale * w2_a @ w2_b``.

    ``w2`` is split in two where that takes fewer numbers; where it is whole, ComfyUI's formula has no
    alpha, and neither has this one.

    Attributes:
        lokr_w1: ``(out_1, in_1)`` with factors of at most 8, Kaiming-uniform at the start.
        lokr_w2: ``(out_2, in_2)``, zero at the start; or ``lokr_w2_a`` ``(out_2, r)``, zero, and
            ``lokr_w2_b`` ``(r, in_2)``.
    """

    file_names: Mapping[str, str] = {name: name for name in ("lokr_w1", "lokr_w2", "lokr_w2_a", "lokr_w2_b")}

    def __init__(self, in_features: int, out_features: int, *, rank: int, alpha: float) -> None:
        super().__init__(in_features, out_features, rank=rank, alpha=alpha)
        out_1, in_1 = _small_factor(out_features), _small_factor(in_features)
        out_2, in_2 = out_features // out_1, in_features // in_1
        self.lokr_w1 = nn.Parameter(torch.empty(out_1, in_1))
        self.is_split = rank * (out_2 + in_2) < out_2 * in_2
        self.zero = "lokr_w2_a" if self.is_split else "lokr_w2"
        if self.is_split:
            self.lokr_w2_a = nn.Parameter(torch.zeros(out_2, rank))
            self.lokr_w2_b = nn.Parameter(torch.empty(rank, in_2))
        else:
            self.lokr_w2 = nn.Parameter(torch.zeros(out_2, in_2))

    def start(self, random: torch.Generator, layer: nn.Module) -> None:
        """Draw everything that is not zero."""
        nn.init.kaiming_uniform_(self.lokr_w1, a=math.sqrt(5), generator=random)
        if self.is_split:
            nn.init.kaiming_uniform_(self.lokr_w2_b, a=math.sqrt(5), generator=random)

    def forward(self, x: Tensor) -> Tensor:
        """Return the addition, without ever building the product."""
        parts = x.unflatten(-1, (self.lokr_w1.shape[1], -1))
        if self.is_split:
            low = F.linear(parts, self.lokr_w2_b.to(x.dtype))
            parts = F.linear(low, self.lokr_w2_a.to(x.dtype)) * self.scale
        else:
            parts = F.linear(parts, self.lokr_w2.to(x.dtype))
        mixed = F.linear(parts.transpose(-1, -2), self.lokr_w1.to(x.dtype))
        return mixed.transpose(-1, -2).flatten(-2)


class LohaAdapter(Adapter):
    """A product of two low-rank matrices, element by element: ``scale * (w1_a @ w1_b) * (w2_a @ w2_b)``.

    Attributes:
        hada_w1_a: ``(out, r)``, normal of deviation 0.1 at the start.
        hada_w1_b: ``(r, in)``, normal of deviation 1.
        hada_w2_a: ``(out, r)``, zero.
        hada_w2_b: ``(r, in)``, normal of deviation 1.
    """

    file_names: Mapping[str, str] = {
        name: name for name in ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")
    }
    zero = "hada_w2_a"

    def __init__(self, in_features: int, out_features: int, *, rank: int, alpha: float) -> None:
        super().__init__(in_features, out_features, rank=rank, alpha=alpha)
        self.hada_w1_a = nn.Parameter(torch.empty(out_features, rank))
        self.hada_w1_b = nn.Parameter(torch.empty(rank, in_features))
        self.hada_w2_a = nn.Parameter(torch.zeros(out_features, rank))
        self.hada_w2_b = nn.Parameter(torch.empty(rank, in_features))

    def start(self, random: torch.Generator, layer: nn.Module) -> None:
        """Draw everything that is not zero."""
        nn.init.normal_(self.hada_w1_a, std=0.1, generator=random)
        nn.init.normal_(self.hada_w1_b, generator=random)
        nn.init.normal_(self.hada_w2_b, generator=random)

    def forward(self, x: Tensor) -> Tensor:
        """Return the addition; the product takes the memory of the layer's weight meanwhile."""
        first, second = self.hada_w1_a @ self.hada_w1_b, self.hada_w2_a @ self.hada_w2_b
        return F.linear(x, (self.scale * first * second).to(x.dtype))


ALGORITHMS: dict[str, type[Adapter]] = {
    "LoRA": LoraAdapter,
    "DoRA": DoraAdapter,
    "LoKr": LokrAdapter,
    "LoHa": LohaAdapter,
}


def check_layer(algorithm: str, path: str, layer: nn.Module) -> None:
    """Refuse a layer that an algorithm cannot work on.

    Raises:
        RequestError: If it needs the weight's values and they are quantized.
    """
    if issubclass(ALGORITHMS[algorithm], DoraAdapter) and not _is_plain(layer):
        kind = type(layer.weight).__name__
        raise RequestError(
            f"algorithm={algorithm!r} was asked for the layer {path}",
            limit=f"It measures the layer's weight, which is quantized here ({kind})",
            way_out="Choose LoRA, LoKr or LoHa, or load the model in bf16",
        )


def _is_plain(layer: nn.Module) -> bool:
    weight: Any = layer.weight
    scaled = getattr(layer, "scale_weight", None) is not None  # fp8 with a scale of its own
    if isinstance(weight, PackedWeight):
        return True
    return weight.is_floating_point() and not is_traceable_wrapper_subclass(weight) and not scaled


def _plain_weight(layer: nn.Module) -> Tensor:
    weight: Any = layer.weight
    return weight.dense() if isinstance(weight, PackedWeight) else weight.detach()


def _small_factor(size: int) -> int:
    """Return the largest divisor of ``size`` that is at most 8 and at most its square root."""
    limit = min(_LOKR_FACTOR, math.isqrt(size))
    return max(factor for factor in range(1, limit + 1) if size % factor == 0)
