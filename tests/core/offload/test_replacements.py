"""Tensors that are replaced, written or loaded while the model is managed."""

from __future__ import annotations

import gc

import pytest
import torch
from comfyui_ferry.core.errors import OffloadError
from comfyui_ferry.core.offload import OffloadTrainingManager
from ferry_support.offload_cases import WIDTH, Counter, Stack, assert_close, build, inputs
from torch import nn


def pair(name: str, on_host: bool = False, threshold: float | None = None, frozen: bool = False):
    plain, model = build(name), build(name)
    if frozen:
        plain.requires_grad_(False), model.requires_grad_(False)
    return plain, model, OffloadTrainingManager(model, "cpu", on_host, threshold)


def assert_same_step(plain: nn.Module, model: nn.Module, manager: OffloadTrainingManager, step: int = 0):
    for m in (plain, model):
        m.zero_grad()
        x = inputs(step)
        m.result = m(x)
        m.result.square().mean().backward()
        m.input_gradient = x.grad
    assert manager.resident_bytes == manager.resident_set_bytes
    manager.after_backward()
    assert_close(model.result.detach(), plain.result.detach())
    assert_close(model.input_gradient, plain.input_gradient)
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert (mine.grad is None) == (other.grad is None)
        if other.grad is not None:
            assert_close(mine.grad, other.grad)


@pytest.mark.parametrize("threshold", [None, 1.0])
@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("assign", [False, True])
def test_load_state_dict(threshold, on_host, frozen, assign):
    plain, model, manager = pair("residual", on_host, threshold, frozen)
    assert_same_step(plain, model, manager)
    other = build("residual", seed=5).state_dict()
    for m in (plain, model):
        m.load_state_dict({name: value.clone() for name, value in other.items()}, assign=assign)
        m.requires_grad_(not frozen)
    before = manager.stats()
    assert_same_step(plain, model, manager, 1)
    after = manager.stats()
    if frozen:
        assert (after.host_bytes, after.num_buckets) == (before.host_bytes, before.num_buckets)
    manager.remove()
    assert all(type(module._parameters) is dict for module in model.modules())
    for name, value in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], value)


@pytest.mark.parametrize("kind", [torch.float64, torch.float32])
def test_a_parameter_whose_data_is_replaced(kind):
    plain, model, manager = pair("residual", frozen=True)
    assert_same_step(plain, model, manager)
    fresh = torch.randn(WIDTH, WIDTH)
    for m in (plain, model):
        if kind == torch.float64:
            m.double()
            m.register_forward_pre_hook(lambda module, args: tuple(a.double() for a in args))
        m.blocks[0].weight.data = fresh.clone().to(kind)
    assert_same_step(plain, model, manager, 1)
    assert_same_step(plain, model, manager, 2)
    manager.remove()
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, other) and mine.dtype == other.dtype


def test_weights_whose_memory_was_shared_meanwhile_are_refused_not_trained_in_vain():
    plain, model, manager = pair("residual", True)
    assert_same_step(plain, model, manager)
    model.share_memory()  # as a queue does with a state_dict that it sends
    with pytest.raises(OffloadError, match=r"blocks\.0.* put elsewhere"):
        model(inputs(0))
    manager.remove()
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, other)
    assert_same_step(plain, model, OffloadTrainingManager(model, "cpu", True), 1)


@pytest.mark.parametrize("on_host", [False, True])
def test_a_new_parameter_object(on_host):
    plain, model, manager = pair("residual", on_host)
    set_before = manager.resident_set_bytes
    fresh = torch.randn(WIDTH, WIDTH)
    for m in (plain, model):
        m.blocks[0].weight = nn.Parameter(fresh.clone())
        m.blocks[1].up.bias = None
        m.blocks[3].register_parameter("extra", nn.Parameter(torch.ones(WIDTH)))
    assert_same_step(plain, model, manager)
    bias_bytes, extra_bytes = 2 * WIDTH * 4, WIDTH * 4
    assert manager.resident_set_bytes == (0 if on_host else set_before - bias_bytes + extra_bytes)
    manager.remove()
    assert dict(model.blocks[3]._parameters).keys() == {"weight", "bias", "extra"}


def test_tying_while_managed():
    plain, model, manager = pair("residual", True)
    for m in (plain, model):
        m.blocks[2].up.weight = m.blocks[1].up.weight
        del m.blocks[2].norm.bias
        m.blocks[2].norm.register_parameter("bias", m.blocks[1].norm.bias)
    assert_same_step(plain, model, manager)
    manager.remove()
    assert model.blocks[2].up.weight is model.blocks[1].up.weight


def test_an_old_parameter_that_somebody_holds_keeps_its_value():
    plain, model, manager = pair("residual", frozen=True)
    old = model.blocks[0].weight
    value = old.detach().clone()
    for m in (plain, model):
        m.blocks[0].weight = nn.Parameter(torch.ones(WIDTH, WIDTH), requires_grad=False)
    assert_same_step(plain, model, manager)
    assert torch.equal(old, value)
    assert_same_step(plain, model, manager)


def test_a_view_of_a_managed_tensor_is_refused():
    _, model, _ = pair("residual", frozen=True)
    model.blocks[0].weight = nn.Parameter(model.blocks[3].weight.detach(), requires_grad=False)
    with pytest.raises(OffloadError, match=r"blocks.0.weight.*view of a managed tensor"):
        model(inputs(0))


def test_a_buffer_replaced_in_a_forward_stays_and_is_counted():
    torch.manual_seed(0)
    plain = Stack(Counter())
    torch.manual_seed(0)
    model = Stack(Counter())
    model.requires_grad_(False), plain.requires_grad_(False)
    manager = OffloadTrainingManager(model, "cpu")
    assert manager.resident_set_bytes == 0
    for step in range(3):
        assert_same_step(plain, model, manager, step)
        assert manager.resident_set_bytes == WIDTH * 4
    for name, value in plain.state_dict().items():
        assert_close(model.state_dict()[name], value)
    model.blocks[0].last = torch.zeros(WIDTH)
    plain.blocks[0].last = torch.zeros(WIDTH)
    assert_same_step(plain, model, manager, 3)
    manager.remove()
    assert_close(model.blocks[0].last, plain.blocks[0].last)


def test_a_buffer_that_grows():
    class Cache(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(0, WIDTH))
            self.register_buffer("table", None, persistent=False)
            self.proj = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            if self.table is None:
                self.table = torch.arange(WIDTH, device=x.device) / WIDTH
            self.seen = torch.cat([self.seen, x.detach()])
            return self.proj(x + self.seen.mean(0) + self.table)

    torch.manual_seed(0)
    plain = Stack(Cache())
    torch.manual_seed(0)
    model = Stack(Cache())
    manager = OffloadTrainingManager(model, "cpu", True)
    for step in range(3):
        assert_same_step(plain, model, manager, step)
    assert manager.resident_set_bytes == 3 * 4 * WIDTH * 4 + WIDTH * 4


@pytest.mark.parametrize("checkpointing", ["none", "non_reentrant", "reentrant"])
@pytest.mark.parametrize("how", ["in place", "data", "load"])
def test_a_weight_changed_between_forward_and_backward_is_noticed(checkpointing, how):
    plain, model, manager = pair("residual", True)
    plain.checkpointing = model.checkpointing = checkpointing
    loss = model(inputs(0)).square().mean()
    weight = model.blocks[3].weight
    with torch.no_grad():
        if how == "in place":
            weight.mul_(2)
        elif how == "load":
            model.load_state_dict(build("residual", seed=3).state_dict())
        else:
            weight.data = torch.ones(WIDTH, WIDTH)
            model(inputs(1))
    if checkpointing != "reentrant":  # stricter than plain non-reentrant checkpointing, which does not look
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation: blocks.3.weight"):
            loss.backward()
    else:
        loss.backward()  # the recompute uses the new value, as in the plain model
    assert manager.resident_bytes == 0


def test_an_activation_changed_between_forward_and_backward_is_noticed():
    class Changes(nn.Module):
        def __init__(self, which: str) -> None:
            super().__init__()
            self.proj = nn.Linear(WIDTH, WIDTH)
            self.which = which

        def forward(self, x):
            h = self.proj(x)
            y = h.exp() if self.which == "output" else h * h
            (y if self.which == "output" else h).mul_(2)
            return y

    for which in ("output", "input"):
        model = Changes(which)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            model(inputs(0)).sum().backward()
        manager = OffloadTrainingManager(model, "cpu")
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            model(inputs(0)).sum().backward()
        manager.remove()


def test_a_parameter_thawed_after_attaching_is_refused_until_a_new_manager():
    _, model, _ = pair("residual", frozen=True)
    model.blocks[0].weight.requires_grad_(True)
    with pytest.raises(OffloadError, match=r"blocks.0.weight requires a gradient now"):
        model(inputs(0))
    manager = OffloadTrainingManager(model, "cpu")
    model(inputs(0)).sum().backward()
    assert model.blocks[0].weight.grad is not None
    manager.remove()


def test_the_optimizer_may_step_inside_the_backward():
    """A step per parameter as its gradient arrives: the master is newer than a cached copy."""
    plain, model, manager = pair("residual")
    manager.remove()
    plain.checkpointing = model.checkpointing = "reentrant"
    for m in (plain, model):
        for p in m.parameters():
            p.register_post_accumulate_grad_hook(_step)
    manager = OffloadTrainingManager(model, "cpu")
    for step in range(3):
        for m in (plain, model):
            m(inputs(step)).square().mean().backward()
        manager.after_backward()
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert_close(mine.detach(), other.detach())


def _step(parameter: torch.Tensor) -> None:
    with torch.no_grad():
        parameter.sub_(parameter.grad, alpha=0.01)
    parameter.grad = None


def test_loading_many_times_does_not_grow():
    _, model, manager = pair("residual", frozen=True)
    model(inputs(0))
    before = manager.stats().host_bytes
    for seed in range(5):
        model.load_state_dict(build("residual", seed=seed).state_dict(), assign=True)
        model.requires_grad_(False)
        gc.collect()
        model(inputs(seed))
    assert manager.stats().host_bytes == before
