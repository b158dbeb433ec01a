"""torch's fused kernel for host parameters: chosen where it is the same, left alone elsewhere."""

from __future__ import annotations

import gc

import pytest
import torch
from comfyui_ferry.core.offload import OffloadTrainingManager
from ferry_support.offload_cases import WIDTH, assert_close, build, inputs
from torch import nn
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
    register_optimizer_step_pre_hook,
)


def fused_during_step(optimizer):
    """What every group says while it steps."""
    seen = []
    inner = optimizer._init_group
    optimizer._init_group = lambda group, *args: (seen.append(group["fused"]), inner(group, *args))[1]
    optimizer.step()
    del optimizer._init_group
    return seen


def with_gradients(model):
    model(inputs(0)).square().mean().backward()
    return model


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_a_plain_optimizer_is_stepped_by_the_fused_kernel_with_the_same_numbers(kind):
    plain, model = build("views"), build("views")
    optimizers = [
        kind([{"params": list(m.parameters())[:2], "lr": 1e-2, "weight_decay": 0.1}, {"params": rest}])
        for m in (plain, model)
        if (rest := list(m.parameters())[2:])
    ]
    manager = OffloadTrainingManager(model, "cpu", True)
    for step in range(4):
        for m, optimizer in zip((plain, model), optimizers, strict=True):
            m(inputs(step)).square().mean().backward()
            if m is model:
                manager.after_backward()
                assert fused_during_step(optimizer) == [True, True]
                assert [group["fused"] for group in optimizer.param_groups] == [None, None]
            else:
                optimizer.step()
            optimizer.zero_grad()
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert_close(mine.detach(), other.detach())
        for name, value in optimizers[0].state[other].items():
            assert_close(optimizers[1].state[mine][name], value)


def test_a_choice_of_the_caller_stands():
    model = with_gradients(build("residual"))
    OffloadTrainingManager(model, "cpu", True)
    for options in (
        {"fused": False},
        {"foreach": True},
        {"foreach": False},
        {"capturable": False, "lr": 0.1},
    ):
        optimizer = torch.optim.AdamW(model.parameters(), **options)
        expected = True if "lr" in options else options.get("fused")
        assert fused_during_step(optimizer) == [expected]


def test_where_the_kernel_would_differ_it_is_not_chosen():
    model = with_gradients(build("residual"))
    other = nn.Linear(WIDTH, 1)
    other(inputs(0)).sum().backward()
    OffloadTrainingManager(model, "cpu", True)
    first = model.blocks[0].weight
    assert fused_during_step(torch.optim.AdamW(other.parameters())) == [None]
    assert fused_during_step(torch.optim.AdamW([first, *other.parameters()])) == [None]
    assert fused_during_step(torch.optim.AdamW([first], lr=torch.tensor(0.1))) == [None]
    first.grad = first.grad.t().contiguous().t()
    assert fused_during_step(torch.optim.AdamW([first])) == [None]
    half = nn.Linear(WIDTH, WIDTH).bfloat16()
    OffloadTrainingManager(half, "cpu", True)
    half(inputs(0).bfloat16()).sum().backward()
    assert fused_during_step(torch.optim.AdamW(half.parameters())) == [None]


def test_a_step_that_raises_leaves_the_group_as_it_was():
    model = with_gradients(build("residual"))
    manager = OffloadTrainingManager(model, "cpu", True)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer._init_group = lambda *args: 1 / 0
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    manager.after_backward()
    assert optimizer.param_groups[0]["fused"] is None


def test_no_hook_of_torch_is_left_behind():
    gc.collect()
    OffloadTrainingManager(build("residual"), "cpu", True).remove()  # takes off what others left
    before = len(_global_optimizer_pre_hooks), len(_global_optimizer_post_hooks)
    manager = OffloadTrainingManager(build("residual"), "cpu", True)
    assert len(_global_optimizer_pre_hooks) == before[0] + 1
    manager.remove()
    assert (len(_global_optimizer_pre_hooks), len(_global_optimizer_post_hooks)) == before
    manager = OffloadTrainingManager(build("residual"), "cpu", True)
    del manager
    gc.collect()
    OffloadTrainingManager(build("residual"), "cpu", True).remove()
    assert (len(_global_optimizer_pre_hooks), len(_global_optimizer_post_hooks)) == before


@pytest.mark.parametrize("fused", [None, True])
def test_an_old_copy_of_a_stepped_weight_is_never_used_again(fused):
    """Somebody's view keeps the slot with the old bytes; fused kernels leave the version as it was."""

    class KeepsView(nn.Linear):
        def forward(self, x):
            self.__dict__["kept"] = self.weight.detach()
            return super().forward(x)

    torch.manual_seed(0)
    plain = KeepsView(WIDTH, WIDTH)
    torch.manual_seed(0)
    model = KeepsView(WIDTH, WIDTH)
    OffloadTrainingManager(model, "cpu", True)
    for m in (plain, model):
        optimizer = torch.optim.AdamW(m.parameters(), lr=0.1, fused=fused)
        m(inputs(0)).square().mean().backward()
        optimizer.step()
        m.result = m(inputs(1))
    assert_close(model.result.detach(), plain.result.detach())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        optimizer.step()
        model.result.sum().backward()


def test_a_manager_that_is_collected_during_a_step_does_no_harm():
    """torch walks through its hooks then, and does not bear that one of them is taken off."""
    model = nn.Linear(2, 2)
    manager = OffloadTrainingManager(model, "cpu", True)
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    manager.itself = manager  # only the collector finds it
    del model, manager
    handle = register_optimizer_step_pre_hook(lambda *_: (gc.collect(), None)[1])
    try:
        optimizer.step()
        optimizer.step()
    finally:
        handle.remove()
