"""What cannot be managed is refused before anything moves."""

from __future__ import annotations

import pytest
import torch
from comfyui_ferry.core.errors import RequestError
from comfyui_ferry.core.offload import OffloadTrainingManager
from ferry_support.offload_cases import WIDTH, Quantized
from torch import nn


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.LazyLinear(4), "no shape yet"),
        (lambda: nn.Linear(4, 4, device="meta"), "have bytes to move"),
        (lambda: torch.jit.script(nn.Linear(4, 4)), "TorchScript"),
        (lambda: torch.ones(3), "works on a torch.nn.Module"),
        (lambda: _with_buffer(torch.eye(3).to_sparse()), "sparse"),
        (lambda: _with_buffer(torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)), "quantized"),
        (lambda: _with_buffer(torch.ones(3, dtype=torch.complex64).conj()), "resolve_conj"),
    ],
)
def test_what_cannot_be_managed_is_refused_before_anything_moves(make, message):
    model = make()
    with pytest.raises(RequestError, match=message):
        OffloadTrainingManager(model, "cpu")
    if isinstance(model, nn.Module):
        assert "_ferry_hooked_forward" not in model.__dict__


def _with_buffer(tensor: torch.Tensor) -> nn.Module:
    module = nn.Linear(3, 3)
    module.register_buffer("odd", tensor)
    return module


def test_a_wrapper_without_flatten_is_refused():
    class Opaque(torch.Tensor):
        @staticmethod
        def __new__(cls):
            return torch.Tensor._make_wrapper_subclass(cls, (3,), dtype=torch.float32)

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            raise NotImplementedError

    with pytest.raises(RequestError, match="no __tensor_flatten__"):
        OffloadTrainingManager(_with_buffer(Opaque()), "cpu")


def test_a_trainable_wrapper_needs_its_optimizer_on_the_target():
    model = Quantized()
    model.weight.requires_grad_(True)
    with pytest.raises(RequestError, match=r"weight \(Parameter|weight \(Int8Weight"):
        OffloadTrainingManager(model, "cpu", True)
    with OffloadTrainingManager(model, "cpu") as manager:
        assert manager.resident_set_bytes > WIDTH * WIDTH
