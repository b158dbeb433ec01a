"""What is trained on a norm, if that was asked for: an addition to its scale, and to its bias."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .adapters import Adapter
from .targets import norm_scale

# Of norms that keep none (FLUX in ComfyUI 0.3.75).
_EPSILON = 1e-6


class NormAdapter(Adapter):
    """``normalised(x) * diff + diff_b``, in the file as ComfyUI's loader adds it to weight and bias.

    Attributes:
        diff: ``(in,)``, zero at the start.
        diff_b: ``(in,)``, zero; only beside a bias.

    Args:
        layer: A layer or RMS norm over the last dimension.
    """

    zero = "diff"

    def __init__(self, layer: nn.Module) -> None:
        found = norm_scale(layer)
        assert found is not None, "is_norm() chose it"
        name, scale = found
        super().__init__(scale.shape[0], scale.shape[0], rank=1, alpha=1.0)
        self.file_names = {} if name == "weight" else {"diff": f"{name}.diff"}
        self.is_centred = isinstance(layer, nn.LayerNorm)
        self.epsilon = getattr(layer, "eps", _EPSILON)
        self.diff = nn.Parameter(torch.zeros(self.in_features))
        if layer._parameters.get("bias") is not None:
            self.add_bias()

    def start(self, random: torch.Generator, layer: nn.Module) -> None:
        """Nothing: all of it is zero."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the addition of the scale."""
        size = (self.in_features,)
        # Without one, torch's RMS norm takes the input type's own.
        epsilon = torch.finfo(x.dtype).eps if self.epsilon is None else self.epsilon
        norm = F.layer_norm if self.is_centred else F.rms_norm
        return norm(x.float(), size, eps=epsilon) * self.diff
