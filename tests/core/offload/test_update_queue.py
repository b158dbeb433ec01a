"""Steps that go on after ``optimizer.step()``: the same numbers, in the order of the next forward."""

from __future__ import annotations

import copy
import io
import random
import threading
import time
import types

import pytest
import torch
from comfyui_ferry.core.errors import OffloadError, RequestError
from comfyui_ferry.core.offload import OffloadTrainingManager
from comfyui_ferry.core.offload.master_steps import MasterStep
from ferry_support.offload_cases import Residual, Stack, build, inputs
from torch import nn

_run = MasterStep.run


@pytest.fixture
def worker(monkeypatch):
    """Hold every step back until ``go`` is set, then take a random time over it; note the order."""

    held = types.SimpleNamespace(go=threading.Event(), permits=None, order=[], longest_s=0.0)
    rng = random.Random(0)

    def run(step, transfer):
        assert held.go.wait(30)
        assert held.permits is None or held.permits.acquire(timeout=30)
        time.sleep(rng.random() * held.longest_s)
        _run(step, transfer)
        held.order.append(step.bucket.name)

    held.go.set()
    monkeypatch.setattr(MasterStep, "run", run)
    return held


def attach(model, kind=torch.optim.AdamW, *, accumulation_steps=1, threshold=None, **options):
    optimizer = kind(model.parameters(), lr=1e-2, **options)
    manager = OffloadTrainingManager(model, "cpu", True, threshold)
    steps = manager.overlap_optimizer(optimizer, accumulation_steps=accumulation_steps, finish="next use")
    return optimizer, manager, steps


def train(model, optimizer, manager, *, steps=1, first=0, micro_batches=1, scheduler=None):
    for step in range(first, first + steps):
        for micro in range(micro_batches):
            model(inputs(step * micro_batches + micro)).square().mean().backward()
        manager.after_backward()
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()


def numbers(model, optimizer):
    """Return copies of everything that training changes; asking for it settles."""
    state = copy.deepcopy(optimizer.state_dict())
    return [p.detach().clone() for p in model.parameters()], state


def assert_equal(actual, expected):
    for mine, other in zip(actual[0], expected[0], strict=True):
        assert torch.equal(mine, other)
    assert actual[1]["param_groups"] == expected[1]["param_groups"]
    assert actual[1]["state"].keys() == expected[1]["state"].keys()
    for key, state in expected[1]["state"].items():
        assert all(
            torch.equal(torch.as_tensor(actual[1]["state"][key][n]), torch.as_tensor(v))
            for n, v in state.items()
        )


@pytest.mark.parametrize(
    ("case", "checkpointing", "threshold", "kind", "micro_batches"),
    [
        ("residual", "none", None, torch.optim.AdamW, 1),
        ("residual", "reentrant", 0.005, torch.optim.NAdam, 1),
        ("tied", "non_reentrant", None, torch.optim.SGD, 3),
        ("modulated adapter", "reentrant", 0.005, torch.optim.Adam, 2),
    ],
)
def test_a_slow_worker_with_random_delays_changes_no_bit(
    worker, case, checkpointing, threshold, kind, micro_batches
):
    """Beside steps that end with ``step()``; a schedule changes the rate while steps are queued."""
    seen = []
    for finish, worker.longest_s in (("step", 0.0), ("next use", 0.004)):
        model = build(case, checkpointing)
        optimizer = kind(model.parameters(), lr=1e-2)
        manager = OffloadTrainingManager(model, "cpu", True, threshold)
        manager.overlap_optimizer(optimizer, accumulation_steps=micro_batches, finish=finish)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
        train(model, optimizer, manager, steps=4, micro_batches=micro_batches, scheduler=scheduler)
        seen.append(numbers(model, optimizer))
        manager.remove()
    assert_equal(seen[1], seen[0])


def test_step_returns_before_the_worker_and_the_next_forward_goes_along_with_it(worker):
    """Queued steps are done first block first, and no block waits for the step of a later one."""
    model = Stack(*(Residual() for _ in range(4)))
    optimizer, manager, steps = attach(model)
    train(model, optimizer, manager, steps=2)
    steps.settle()
    names = [
        manager.running_engine().store.find(layer.weight).bucket.name
        for block in model.blocks
        for layer in (block.norm, block.up, block.down)
    ]
    worker.order.clear()
    worker.permits = threading.Semaphore(0)
    train(model, optimizer, manager)  # returns although nothing can be stepped yet
    assert worker.order == []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda *_: worker.permits.release(3))
    worker.permits.release()  # for the step that was chosen before the others were there
    with torch.no_grad():
        model(inputs(9))
    first, *rest = worker.order
    assert rest == [name for name in names if name != first]
    worker.permits = None
    steps.settle()


def test_whoever_looks_from_outside_waits(worker):
    """Every way to parameters, state and gradients that can be seen waits until the worker is done."""
    model = build("residual")
    optimizer, manager, steps = attach(model)
    train(model, optimizer, manager, steps=2)
    content = copy.deepcopy(model.state_dict())
    layer = model.blocks[-1]
    own = ("entry", "copy")
    looks = {
        "entry": lambda: layer.weight,
        "copy": lambda: copy.copy(layer._parameters),
        "state_dict": model.state_dict,
        "parameters": lambda: list(model.parameters()),
        "save": lambda: torch.save(model.state_dict(), io.BytesIO()),
        "load": lambda: model.load_state_dict(content),
        "optimizer.state_dict": optimizer.state_dict,
        "optimizer.load_state_dict": lambda: optimizer.load_state_dict(optimizer.state_dict()),
        "optimizer.zero_grad": lambda: optimizer.zero_grad(set_to_none=False),
        "model.zero_grad": model.zero_grad,
        "settle": steps.settle,
        "assignment": lambda: setattr(layer, "bias", nn.Parameter(torch.zeros_like(layer.bias))),
    }
    for step, (name, look) in enumerate(looks.items(), start=2):
        optimizer.zero_grad()
        worker.go.clear()
        model(inputs(step)).square().mean().backward()
        manager.after_backward()
        optimizer.step()
        queued = [bucket for bucket in manager.running_engine().store.buckets if bucket.update is not None]
        assert queued, name
        threading.Timer(0.02, worker.go.set).start()
        look()
        assert worker.go.is_set(), f"{name} did not wait"
        assert name in own or not any(bucket.update for bucket in queued), name
        steps.settle()


def test_a_read_is_never_older_than_the_step(worker):
    """A look from outside gives the numbers that it gives if steps end with ``step()``."""
    results = []
    for finish in ("step", "next use"):
        worker.longest_s = 0.003
        model = build("residual")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        manager = OffloadTrainingManager(model, "cpu", True)
        manager.overlap_optimizer(optimizer, finish=finish)
        weight, seen = model.blocks[1].up.weight, []
        for step in range(6):
            train(model, optimizer, manager, first=step)
            if step == 2:
                seen.append(model.blocks[1].up.weight.detach().clone())
            elif step == 3:
                seen += [v.clone() for v in model.state_dict().values()]
            elif step == 4:  # another optimizer over one of them
                weight.grad = torch.ones_like(weight)
                torch.optim.SGD([weight], lr=0.1).step()
                weight.grad = None
            elif step == 5:
                manager.remove()
                seen += [p.detach().clone() for p in model.parameters()]
        results.append(seen)
    for mine, expected in zip(*results, strict=True):
        assert torch.equal(mine, expected)


def test_writes_that_nobody_sees_coming_are_found(worker):
    """Whether the worker had come to it or not."""
    for target in ("gradient", "parameter"):
        for is_done in (False, True):
            model = build("residual")
            parameters = list(model.parameters())
            optimizer, manager, steps = attach(model)
            train(model, optimizer, manager, steps=2)
            steps.settle()
            if not is_done:
                worker.go.clear()
            model(inputs(5)).square().mean().backward()
            optimizer.step()
            queued = [bucket.update for bucket in manager.running_engine().store.buckets if bucket.update]
            deadline = time.monotonic() + 30
            while is_done and not all(each.is_over for each in queued) and time.monotonic() < deadline:
                time.sleep(0.001)
            with torch.no_grad():
                (parameters[0].grad if target == "gradient" else parameters[0]).mul_(2)
            worker.go.set()
            with pytest.raises(OffloadError, match=r"written after.*settle\(\)"):
                model(inputs(7))
            steps.settle()
            manager.remove()


def test_what_the_worker_meets_is_raised_once_and_nothing_hangs(worker, monkeypatch):
    def fail(step, transfer):
        if step.bucket.name == failing:
            raise torch.OutOfMemoryError("planted")
        _run(step, transfer)

    model = build("residual")
    optimizer, manager, steps = attach(model)
    train(model, optimizer, manager, steps=2)
    steps.settle()
    failing = manager.running_engine().store.find(model.blocks[1].up.weight).bucket.name
    for look in (lambda: model(inputs(0)), steps.settle, optimizer.state_dict, steps.remove):
        with monkeypatch.context() as patch:
            patch.setattr(MasterStep, "run", fail)
            train(model, optimizer, manager)
            with pytest.raises(torch.OutOfMemoryError, match="planted"):
                look()
        steps.settle()
    train(model, optimizer, manager)
    steps = manager.overlap_optimizer(optimizer, finish="next use")
    train(model, optimizer, manager, steps=2)
    steps.settle()  # what is planted is for the steps that come
    with monkeypatch.context() as patch:
        patch.setattr(MasterStep, "run", fail)
        train(model, optimizer, manager)
        with pytest.raises(torch.OutOfMemoryError, match="planted"):
            manager.remove()
    manager.remove()
    assert "step" not in optimizer.__dict__ and "zero_grad" not in optimizer.__dict__


def test_a_backward_of_an_old_graph_is_refused_as_ever(worker):
    model = build("residual")
    optimizer, manager, steps = attach(model)
    train(model, optimizer, manager, steps=2)
    loss = model(inputs(3)).square().mean()
    loss.backward(retain_graph=True)
    worker.longest_s = 0.005
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with pytest.raises(RequestError, match="finish="):
        manager.overlap_optimizer(optimizer, finish="later")
    assert steps.is_on
