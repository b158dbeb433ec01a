"""Gradients of parameters that live on the host."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from comfyui_ferry.core.errors import OffloadError, RequestError
from comfyui_ferry.core.offload import OffloadTrainingManager
from ferry_support.offload_cases import WIDTH, assert_close, assert_same_run, build, inputs, train
from torch import nn


@pytest.mark.parametrize("checkpointing", ["none", "reentrant", "non_reentrant"])
@pytest.mark.parametrize("name", ["residual", "tied", "views", "custom function"])
def test_accumulation_of_any_length(name, checkpointing):
    expected = train(build(name, checkpointing), micro_batches=4)
    model = build(name, checkpointing)
    manager = OffloadTrainingManager(model, "cpu", True)
    assert_same_run(train(model, manager, micro_batches=4), expected)


def test_gradients_are_complete_even_before_after_backward():
    plain, model = build("tied"), build("tied")
    OffloadTrainingManager(model, "cpu", True)
    for m in (plain, model):
        for step in range(2):
            m(inputs(step)).square().mean().backward()
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert_close(mine.grad, other.grad)


def test_a_gradient_that_somebody_keeps_is_not_overwritten():
    model = build("residual")
    OffloadTrainingManager(model, "cpu", True)
    model(inputs(0)).square().mean().backward()
    kept = model.blocks[0].weight.grad
    value = kept.clone()
    model.zero_grad()
    model(inputs(1)).square().mean().backward()
    assert torch.equal(kept, value)
    assert not torch.equal(model.blocks[0].weight.grad, value)


def test_accumulation_is_in_place_as_autograds_own():
    model = build("residual")
    OffloadTrainingManager(model, "cpu", True)
    model(inputs(0)).square().mean().backward()
    gradient = model.blocks[0].weight.grad
    model(inputs(1)).square().mean().backward()
    assert model.blocks[0].weight.grad is gradient
    model.zero_grad(set_to_none=False)
    assert model.blocks[0].weight.grad is gradient and not gradient.any()


def test_landing_memory_is_used_again():
    model = nn.Linear(WIDTH, WIDTH)
    OffloadTrainingManager(model, "cpu", True)
    addresses = set()
    for step in range(4):
        model(inputs(step)).sum().backward()
        addresses.add(model.weight.grad.data_ptr())
        model.zero_grad()
    assert len(addresses) == 1


def test_gradients_from_before_are_added_to():
    plain, model = build("residual"), build("residual")
    for m in (plain, model):
        m(inputs(0)).square().mean().backward()
    manager = OffloadTrainingManager(model, "cpu", True)
    for m in (plain, model):
        m(inputs(1)).square().mean().backward()
    manager.after_backward()
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert_close(mine.grad, other.grad)


def test_sparse_gradients():
    results = []
    for managed in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(9, WIDTH, sparse=True), nn.Linear(WIDTH, 1))
        manager = OffloadTrainingManager(model, "cpu", True) if managed else None
        stepper = torch.optim.SparseAdam(list(model[0].parameters()), lr=0.1)
        for step in range(3):
            model(torch.tensor([1, 2, 2, step])).square().sum().backward()
            model(torch.tensor([3, step])).square().sum().backward()
            if manager is not None:
                manager.after_backward()
            stepper.step()
            stepper.zero_grad()
        results.append(model[0].weight.detach().clone())
    assert_close(results[1], results[0])


def test_a_gradient_that_is_differentiated_again():
    plain, model = build("residual"), build("residual")
    manager = OffloadTrainingManager(model, "cpu", True)
    for m in (plain, model):
        m(inputs(0)).square().mean().backward(create_graph=True)
        norm = sum(p.grad.square().sum() for p in m.parameters())
        m.second = torch.autograd.grad(norm, m.blocks[3].weight)[0]
    manager.after_backward()
    assert_close(model.second, plain.second)


def test_hooks_of_the_user_stay():
    model = nn.Linear(WIDTH, WIDTH)
    seen = []
    handle = model.weight.register_hook(lambda gradient: seen.append("user"))
    with OffloadTrainingManager(model, "cpu", True):
        model(inputs(0)).sum().backward()
    model(inputs(0)).sum().backward()
    assert seen == ["user", "user"]
    handle.remove()


def test_hooks_that_would_find_no_gradient_are_refused():
    """The usual recipe for a step in the backward would train nothing, without a word."""
    for is_first in (True, False):
        model = nn.Linear(WIDTH, WIDTH)
        manager = None if is_first else OffloadTrainingManager(model, "cpu", True)
        handle = model.weight.register_post_accumulate_grad_hook(lambda parameter: None)
        if manager is None:
            with pytest.raises(RequestError, match=r"weight .*post-accumulate-grad"):
                OffloadTrainingManager(model, "cpu", True)
            OffloadTrainingManager(model, "cpu", False).remove()
        else:
            with pytest.raises(OffloadError, match="weight was given a post-accumulate-grad hook"):
                model(inputs(0)).sum().backward()
        handle.remove()
        OffloadTrainingManager(model, "cpu", True)
        OffloadTrainingManager(model, "cpu", True)  # its own hooks are no others
        model(inputs(0)).sum().backward()
        assert model.weight.grad is not None


@pytest.mark.parametrize("fused", [False, True])
def test_clipping_and_a_cpu_optimizer_between(fused):
    plain, model = build("residual"), build("residual")
    manager = OffloadTrainingManager(model, "cpu", True)
    for m in (plain, model):
        stepper = torch.optim.AdamW(m.parameters(), lr=1e-2, fused=fused)
        for step in range(3):
            m(inputs(step)).square().mean().backward()
            if m is model:
                manager.after_backward()
            m.norm = nn.utils.clip_grad_norm_(m.parameters(), 0.1)
            stepper.step()
            stepper.zero_grad()
    assert_close(model.norm, plain.norm)
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert_close(mine.detach(), other.detach())


def test_micro_batches_pass_through_a_bounded_ring():
    """However many there are, the sum stays where the first landed and no host memory is added."""
    model = build("residual")
    manager = OffloadTrainingManager(model, "cpu", True)
    host_bytes, addresses = [], set()
    for step in range(6):
        model(inputs(step)).square().mean().backward()
        addresses.add(tuple(p.grad.data_ptr() for p in model.parameters()))
        host_bytes.append(manager.stats().host_bytes)
    assert len(addresses) == 1
    assert host_bytes[1] == host_bytes[-1] < 3 * host_bytes[0]


def test_late_arrivals_change_nothing(monkeypatch):
    """What the worker adds must have arrived: each copy is made only when its arrival is waited for."""
    from comfyui_ferry.core.offload.transfer import Arrival, Transfer

    class Late(Arrival):
        def __init__(self, gradient, host):
            self.gradient, self.host = gradient.clone(), host
            host.fill_(float("nan"))

        def wait(self):
            with lock:
                if self.gradient is not None:
                    time.sleep(0.002)
                    self.host.copy_(self.gradient)
                    self.gradient = None

    sent, lock = [], threading.Lock()

    def send(self, gradient, host):
        sent.append(Late(gradient, host))
        return sent[-1]

    monkeypatch.setattr(Transfer, "send_gradient", send)
    monkeypatch.setattr(Transfer, "finish_gradients", lambda self: [late.wait() for late in sent])
    plain, model = build("residual"), build("residual")
    OffloadTrainingManager(model, "cpu", True)
    for m in (plain, model):
        for step in range(3):
            sent.clear()
            m(inputs(step)).square().mean().backward()
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert_close(mine.grad, other.grad)
