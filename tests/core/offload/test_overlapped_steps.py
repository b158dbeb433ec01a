"""Steps on the host during the backward: same numbers, every misuse refused."""

from __future__ import annotations

import pytest
import torch
from comfyui_ferry.core.errors import OffloadError, RequestError
from comfyui_ferry.core.offload import OffloadTrainingManager
from comfyui_ferry.core.offload.overlapped_steps import _SEPARABLE
from ferry_support.offload_cases import WIDTH, Residual, Stack, assert_close, build, inputs
from torch import nn


def run(model, optimizer, *, manager=None, steps=4, micro_batches=1, scheduler=None):
    for step in range(steps):
        for micro in range(micro_batches):
            model(inputs(step * micro_batches + micro)).square().mean().backward()
        if manager is not None:
            manager.after_backward()
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()


def pair(case="residual", checkpointing="none", kind=torch.optim.AdamW, threshold=None, **options):
    plain, model = build(case, checkpointing), build(case, checkpointing)
    plain_optimizer = kind(plain.parameters(), **options)
    optimizer = kind(model.parameters(), **options)
    manager = OffloadTrainingManager(model, "cpu", True, threshold)
    return plain, plain_optimizer, model, optimizer, manager


def assert_same(model, plain, optimizer, plain_optimizer):
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert_close(mine.detach(), other.detach())
    mine, other = optimizer.state_dict(), plain_optimizer.state_dict()
    assert mine["param_groups"] == other["param_groups"] and mine["state"].keys() == other["state"].keys()
    for key, state in other["state"].items():
        for name, value in state.items():
            assert_close(torch.as_tensor(mine["state"][key][name]), torch.as_tensor(value))


@pytest.mark.parametrize("kind", _SEPARABLE, ids=lambda kind: kind.__name__)
def test_every_kind_gives_the_numbers_of_its_own_step(kind):
    plain, plain_optimizer, model, optimizer, manager = pair(kind=kind, lr=1e-2)
    overlapped = manager.overlap_optimizer(optimizer)
    run(plain, plain_optimizer)
    run(model, optimizer, manager=manager)
    assert_same(model, plain, optimizer, plain_optimizer)
    model(inputs(9)).sum().backward()
    assert overlapped.num_stepped == len(list(model.parameters()))


@pytest.mark.parametrize(
    ("case", "threshold", "checkpointing"),
    [
        ("tied", None, "non_reentrant"),
        ("tied", 0.005, "none"),
        ("modulated adapter", 0.005, "reentrant"),
        ("orphans, keyword-only, dict", None, "reentrant"),
        ("lstm", None, "none"),
    ],
)
def test_models_and_accumulation(case, threshold, checkpointing):
    plain, plain_optimizer, model, optimizer, manager = pair(
        case, checkpointing, threshold=threshold, lr=1e-2
    )
    manager.overlap_optimizer(optimizer, accumulation_steps=3)
    run(plain, plain_optimizer, micro_batches=3)
    run(model, optimizer, manager=manager, micro_batches=3)
    assert_same(model, plain, optimizer, plain_optimizer)


def test_a_scheduler_groups_and_momentum_that_were_there_before():
    plain, plain_optimizer, model, optimizer, manager = pair(lr=1e-2, kind=torch.optim.SGD, momentum=0.9)
    for m, o in ((plain, plain_optimizer), (model, optimizer)):
        run(m, o, steps=2)
        extra = nn.Parameter(torch.ones(3))
        extra.grad = torch.ones(3)
        o.add_param_group({"params": [extra], "lr": 0.5})
    before = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    overlapped = manager.overlap_optimizer(optimizer)
    after = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    run(model, optimizer, manager=manager, scheduler=after)
    plain_before = torch.optim.lr_scheduler.ExponentialLR(plain_optimizer, 0.5)
    run(plain, plain_optimizer, scheduler=torch.optim.lr_scheduler.ExponentialLR(plain_optimizer, 0.9))
    assert before.last_epoch == plain_before.last_epoch
    assert_same(model, plain, optimizer, plain_optimizer)
    overlapped.remove()
    run(model, optimizer, manager=manager)
    run(plain, plain_optimizer)
    assert_same(model, plain, optimizer, plain_optimizer)


def test_weights_change_while_the_backward_is_still_running():
    model = Stack(*(Residual() for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    manager = OffloadTrainingManager(model, "cpu", True)
    manager.overlap_optimizer(optimizer)
    run(model, optimizer, manager=manager, steps=1)
    last, seen = model.blocks[-1].down.weight, []
    old = last.detach().clone()

    def look(gradient):
        manager._engine.gradients.worker.drain()
        seen.append(not torch.equal(last.detach(), old))

    handle = model.blocks[0].up.weight.register_hook(look)
    model(inputs(1)).square().mean().backward()
    handle.remove()
    assert seen == [True]


def test_loops_that_cannot_be_overlapped_are_refused_before_anything_is_stepped_early():
    def clip(model, optimizer):
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    def again(model, optimizer):
        model(inputs(1)).square().mean().backward()

    def new_rate(model, optimizer):
        optimizer.param_groups[0]["lr"] = 1.0

    def scaled(model, optimizer):
        optimizer.grad_scale = torch.tensor(2.0)

    for misuse, words in ((clip, "changed between"), (again, "2 gradients"), (new_rate, "hyperparameters")):
        *_, model, optimizer, manager = pair(lr=1e-2)
        manager.overlap_optimizer(optimizer)
        before = [p.detach().clone() for p in model.parameters()]
        model(inputs(0)).square().mean().backward()
        misuse(model, optimizer)
        with pytest.raises(RequestError, match=words):
            optimizer.step()
        assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    for misuse, words in ((clip, "changed between"), (new_rate, "hyperparam"), (scaled, "grad_scale")):
        *_, model, optimizer, manager = pair(lr=1e-2)
        manager.overlap_optimizer(optimizer)
        run(model, optimizer, manager=manager, steps=1)
        model(inputs(0)).square().mean().backward()
        misuse(model, optimizer)
        with pytest.raises(OffloadError, match=words):
            optimizer.step()
    *_, model, optimizer, manager = pair(lr=1e-2)
    manager.overlap_optimizer(optimizer)
    run(model, optimizer, manager=manager, steps=1)
    model(inputs(0)).square().mean().backward()
    with pytest.raises(OffloadError, match="came after"):
        again(model, optimizer)
    with pytest.raises(RequestError, match="closure"):
        optimizer.step(lambda: torch.tensor(0.0))


def test_requests_that_are_refused():
    *_, model, optimizer, manager = pair(lr=1e-2)
    for steps in (0, -1, 1.5, True):
        with pytest.raises(RequestError, match="accumulation_steps"):
            manager.overlap_optimizer(optimizer, accumulation_steps=steps)
    with pytest.raises(RequestError, match="LBFGS"):
        manager.overlap_optimizer(torch.optim.LBFGS(model.parameters()))
    handle = optimizer.register_step_pre_hook(lambda *args: None)
    with pytest.raises(RequestError, match="hooks"):
        manager.overlap_optimizer(optimizer)
    handle.remove()
    with pytest.raises(RequestError, match="of other parameters"):
        manager.overlap_optimizer(torch.optim.SGD(nn.Linear(2, 2).parameters()))
    resident = OffloadTrainingManager(nn.Linear(WIDTH, WIDTH), "cpu")
    with pytest.raises(RequestError, match="enable_optimizer_cpu_offload"):
        resident.overlap_optimizer(optimizer)


def test_removing_the_manager_leaves_the_optimizer_as_it_was():
    *_, model, optimizer, manager = pair(lr=1e-2)
    before = dict(optimizer.__dict__)
    manager.overlap_optimizer(optimizer)
    run(model, optimizer, manager=manager, steps=2)
    manager.remove()
    assert optimizer.__dict__.keys() == before.keys()
    run(model, optimizer, steps=1)
