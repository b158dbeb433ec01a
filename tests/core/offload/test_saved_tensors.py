from __future__ import annotations

import weakref

import pytest
import torch
from comfyui_ferry.core.errors import OffloadError
from comfyui_ferry.core.offload import OffloadTrainingManager, saved_tensors
from ferry_support.offload_cases import WIDTH, assert_close, build, inputs
from torch import nn


def test_a_torch_without_the_internals_is_refused_at_construction(monkeypatch):
    missing = ("torch._C._autograd", "_no_such_function")
    monkeypatch.setattr(saved_tensors, "_REQUIRED", (*saved_tensors._REQUIRED, missing))
    model = nn.Linear(2, 2)
    with pytest.raises(OffloadError, match=f"_no_such_function.*{torch.__version__.split('+')[0]}"):
        OffloadTrainingManager(model, "cpu")
    assert type(model._parameters) is dict


def test_where_hooks_are_disabled_gradients_are_refused():
    """Without hooks autograd would save the parameter itself, which is on the host by the backward."""
    plain, model = build("residual"), build("residual")
    manager = OffloadTrainingManager(model, "cpu")
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        with pytest.raises(OffloadError, match="not here"):
            model(inputs(0))
        with torch.no_grad():
            assert_close(model(inputs(0)), plain(inputs(0)))
    assert manager.resident_bytes == manager.resident_set_bytes
    with pytest.raises(OffloadError, match=r"torch\.func"):
        torch.func.jacrev(lambda v: model(v[None])[0])(torch.randn(WIDTH))
    assert manager.resident_bytes == manager.resident_set_bytes


def test_inspecting_a_graph_gives_the_weight_and_lets_go_of_it():
    model = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
    expected = model.weight.clone()
    manager = OffloadTrainingManager(model, "cpu")
    y = model(inputs(0))
    saved = y.grad_fn._saved_mat2
    assert torch.equal(saved, expected.t())
    assert manager.resident_bytes > 0
    del saved
    assert manager.resident_bytes == 0


def test_a_forward_without_a_backward_leaves_nothing_behind():
    """An operation that keeps its own output (tanh) must not keep itself alive with it."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Sigmoid())
    kept = []
    model[1].register_forward_hook(lambda _, args, output: kept.append(weakref.ref(output)))
    with OffloadTrainingManager(model, "cpu"):
        model(inputs(0)).sum()
        assert [reference() for reference in kept] == [None]


def test_lazy_conjugates_and_negatives_of_weights():
    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.weight = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64), requires_grad=False)

        def forward(self, x):
            return (x * self.weight.conj() * self.weight.conj().imag).abs()

    plain, model = Complex(), Complex()
    manager = OffloadTrainingManager(model, "cpu")
    results = []
    for m in (plain, model):
        x = inputs(0)
        m(x).sum().backward()
        results.append(x.grad)
    assert_close(results[1], results[0])
    assert manager.resident_bytes == 0


def test_the_hooks_come_off_in_the_right_order():
    model = build("residual")
    OffloadTrainingManager(model, "cpu")
    seen = []

    def pack(tensor):
        seen.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(inputs(0))
        assert torch._C._autograd._top_saved_tensors_default_hooks(True)[0] is pack
    assert seen
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
