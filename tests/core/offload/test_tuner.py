"""What stays on the target: kept exactly, planned within the budget, predicted as it then is."""

from __future__ import annotations

import types

import pytest
import torch
from comfyui_ferry.core.errors import RequestError
from comfyui_ferry.core.offload import (
    OffloadBudget,
    OffloadTrainingManager,
    marks,
    retry_on_oom,
    transfer,
    tuner,
)
from comfyui_ferry.core.offload.planner import GB
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH, COUNT = 32, 8
ONE = WIDTH * WIDTH * 4


class Blocks(nn.Module):
    def __init__(self, checkpointing="non_reentrant"):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(COUNT))
        self.adapter = nn.Linear(WIDTH, WIDTH)
        self.blocks.requires_grad_(False)
        self.checkpointing = checkpointing

    def forward(self, x):
        for block in self.blocks:
            if self.checkpointing == "none":
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.checkpointing == "reentrant")
        return self.adapter(x)


class Clock:
    """Time that only copies and computation make pass."""

    def __init__(self, bytes_per_s, block_s):
        self.now = 0.0
        self.bytes_per_s = bytes_per_s
        self.block_s = block_s

    def perf_counter(self):
        return self.now

    def copy(self, source, destination):
        self.now += source.numel() / self.bytes_per_s
        destination.copy_(source)

    def compute(self, module, args, output):
        self.now += self.block_s  # a recompute stops before it gets here


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    clock = Clock(bytes_per_s=100 * ONE, block_s=0.004)
    for module in (marks, transfer, tuner):
        monkeypatch.setattr(module, "time", types.SimpleNamespace(perf_counter=clock.perf_counter))
    monkeypatch.setattr(
        transfer.Transfer, "_copy_now", lambda self, source, target: clock.copy(source, target)
    )
    return clock


def step(model, manager=None, seed=0):
    model.zero_grad()
    x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(seed)).requires_grad_()
    model(x).square().sum().backward()
    if manager is not None:
        manager.after_backward()
    return [x.grad, *(p.grad.clone() for p in model.adapter.parameters())]


def plan_for(model, budget_blocks):
    """Let a first manager find a plan."""
    with OffloadTrainingManager(model, "cpu", budget=budget(budget_blocks)) as manager:
        for _ in range(7):
            step(model, manager)
        return manager.residency_plan


def budget(blocks):
    adapters = (WIDTH + 1) * WIDTH * 4
    return OffloadBudget(vram_gb=(blocks * ONE + adapters) / GB)


@pytest.mark.parametrize("checkpointing", ["none", "reentrant", "non_reentrant"])
def test_a_planned_training_is_exact_and_keeps_to_its_budget(checkpointing):
    plain, model = Blocks(checkpointing), Blocks(checkpointing)
    before = [p.clone() for p in model.parameters()]
    manager = OffloadTrainingManager(model, "cpu", budget=budget(5))
    for seed in range(8):
        moved = manager.stats().moved_to_target_bytes
        actual = step(model, manager, seed)
        assert all(torch.equal(a, b) for a, b in zip(actual, step(plain, seed=seed), strict=True))
        assert manager.resident_bytes == manager.resident_set_bytes
        moved = manager.stats().moved_to_target_bytes - moved
    plan = manager.residency_plan
    assert plan.num_blocks == COUNT and 3 <= plan.num_resident_blocks <= 4  # and room for one or two
    assert moved == plan.prediction.moved_bytes == (2 * (COUNT - plan.num_resident_blocks) - 1) * ONE
    assert manager.stats().peak_resident_bytes <= budget(5).vram_gb * GB
    manager.remove()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))


def test_a_plan_can_be_given_and_lowered():
    model = Blocks()
    plan = plan_for(model, 5)
    manager = OffloadTrainingManager(model, "cpu", plan=plan)
    assert manager.residency_plan is plan
    first = step(model, manager)
    kept = plan.num_resident_blocks * ONE
    fixed = manager.resident_set_bytes - kept
    assert fixed == (WIDTH + 1) * WIDTH * 4
    assert manager.lower_residency(ONE + 1) == 2 * ONE
    assert manager.resident_bytes == manager.resident_set_bytes == fixed + kept - 2 * ONE
    assert manager.stats().slot_bytes <= kept - 2 * ONE + plan.ring_bytes
    assert all(torch.equal(a, b) for a, b in zip(step(model, manager), first, strict=True))
    assert manager.lower_residency(10**9) == kept - 2 * ONE
    assert manager.resident_bytes == fixed


def test_a_kept_weight_that_changes_is_brought_in_again():
    plain, model = Blocks(), Blocks()
    plan = plan_for(model, 20)
    assert plan.num_resident_blocks == COUNT
    manager = OffloadTrainingManager(model, "cpu", plan=plan)
    step(model, manager)
    for m in (plain, model):
        with torch.no_grad():
            m.blocks[2].weight.mul_(2)
            m.load_state_dict({name: value + 1 for name, value in m.state_dict().items()})
        m.blocks[5].weight = nn.Parameter(torch.ones(WIDTH, WIDTH), requires_grad=False)
    assert all(torch.equal(a, b) for a, b in zip(step(model, manager), step(plain), strict=True))
    assert manager.resident_bytes == manager.resident_set_bytes


def test_blocks_of_two_sizes_have_the_slots_that_the_plan_counts():
    torch.manual_seed(0)
    layers = [nn.Linear(width, width, bias=False) for width in (512, 512, 512, 320, 320, 320, 320)]
    model = nn.ModuleList(layers).requires_grad_(False)

    def pass_through(manager):
        x = torch.randn(2, 512).requires_grad_()
        for layer in model:
            x = checkpoint(layer, x[:, : layer.in_features], use_reentrant=False)
        x.sum().backward()
        manager.after_backward()

    largest = 512 * 512 * 4
    manager = OffloadTrainingManager(model, "cpu", budget=OffloadBudget(vram_gb=3.5 * largest / GB))
    pool, top = manager._engine.residency.pool, 0
    for layer in model:
        layer.register_forward_hook(lambda *_: seen.append(pool.allocated_bytes))
    for _ in range(9):
        seen = []
        pass_through(manager)
        top = max(seen)
    assert top == manager.residency_plan.prediction.peak_bytes <= 3.5 * largest
    assert top > manager.residency_plan.ring_bytes


@pytest.mark.parametrize("has_stepped", [True, False], ids=["with state", "before the optimizer's step"])
@pytest.mark.parametrize("seen", [True, False], ids=["seen", "not seen"])
def test_what_the_budget_is_for_is_corrected_by_what_was_seen(monkeypatch, seen, has_stepped):
    """Recordings and the optimizer's state take more than was thought; what stays makes room for them.

    Many micro-steps make a step: then the state is still to come, and counts once all the same.
    """
    model = Blocks()
    manager = OffloadTrainingManager(model, "cpu", budget=budget(7))
    # Until there are any, a quarter more than they say.
    recordings = types.SimpleNamespace(needed_bytes=ONE * 4 // 5, pool_bytes=0, num_recordings=0)
    later = {"bytes": ONE}
    manager.tuner.recordings, manager.tuner.later_bytes = recordings, lambda: later["bytes"]
    plans = []
    for index in range(7):
        step(model, manager)
        plans.append(manager.residency_plan)
        if index == 2:
            recordings.pool_bytes, later["bytes"] = 2 * ONE, 0 if has_stepped else ONE
            fixed = manager.resident_set_bytes - plans[2].num_resident_blocks * ONE
            found = fixed + 2 * ONE - later["bytes"] if seen else None
            monkeypatch.setattr(type(manager.tuner), "_seen_other_bytes", lambda _, found=found: found)
    first, last = plans[1], plans[-1]
    assert manager.tuner.has_reserve and first.prediction.peak_bytes <= budget(7).vram_gb * GB
    assert last.num_resident_blocks == first.num_resident_blocks - (2 if seen else 1)
    assert last.prediction.peak_bytes <= budget(7).vram_gb * GB


@pytest.mark.parametrize("link_later", [1.0, 0.6, 1.6])
def test_the_prediction_is_right_within_a_tenth(clock, link_later):
    """Measured at one rate of the link; it is another one afterwards, which the correction notices."""
    model = Blocks()
    for block in model.blocks:
        block.register_forward_hook(clock.compute)
    manager = OffloadTrainingManager(model, "cpu", budget=budget(5))
    for index in range(10):
        if index == 2:
            clock.bytes_per_s *= link_later
        began = clock.now
        step(model, manager)
        taken_s = clock.now - began
    predicted = manager.residency_plan.prediction
    assert taken_s == pytest.approx(predicted.step_s, rel=0.1)
    streamed = COUNT - manager.residency_plan.num_resident_blocks
    # The backward begins with the block that is still there.
    assert taken_s == pytest.approx(COUNT * 0.004 + (2 * streamed - 1) / (100 * link_later))


def test_bad_budgets_are_refused():
    for values in ({"vram_gb": -1}, {"vram_gb": "12"}, {"ram_gb": float("nan")}, {"pin_gb": True}):
        with pytest.raises(RequestError, match=next(iter(values))):
            OffloadBudget(**values)
    model = Blocks()
    with pytest.raises(RequestError, match="of host memory"):
        OffloadTrainingManager(model, "cpu", budget=OffloadBudget(ram_gb=ONE / GB))
    for option in ("budget", "plan", "pinning", "modulation", "shared_masters"):
        with pytest.raises(RequestError, match=f"{option}=12"):
            OffloadTrainingManager(model, "cpu", **{option: 12})
    assert type(model.adapter.__dict__["_parameters"]) is dict


def test_a_plan_of_another_model_leaves_the_model_alone():
    plan = plan_for(Blocks(), 5)
    model = nn.Linear(2, 2)
    with pytest.raises(RequestError, match="none of that name"):
        OffloadTrainingManager(model, "cpu", plan=plan)
    assert type(model.__dict__["_parameters"]) is dict and "forward" not in model.__dict__


@pytest.mark.parametrize("grows_at", [1, 5], ids=["when measured", "when corrected"])
def test_whoever_goes_on_with_a_budget_that_was_too_small_is_asked_again(monkeypatch, grows_at):
    """The training stays exact, and a smaller step is planned as if it were the first."""
    plain, model = Blocks(), Blocks()
    manager = OffloadTrainingManager(model, "cpu", budget=budget(5))
    refused = []
    for seed in range(14):
        needed = budget(9).vram_gb * GB if grows_at <= seed < 8 else 0
        monkeypatch.setattr(
            type(manager.tuner), "_measure_other_bytes", lambda *_, needed=needed: int(needed)
        )
        monkeypatch.setattr(type(manager.tuner), "_seen_other_bytes", lambda _, needed=needed: int(needed))
        try:
            step(model, manager, seed)
        except RequestError:
            refused.append(seed)
        gradients = [p.grad for p in model.adapter.parameters()]
        assert all(torch.equal(a, b) for a, b in zip(gradients, step(plain, seed=seed)[1:], strict=True))
    assert refused == list(range(grows_at, 8))
    assert manager.tuner.is_done and manager.residency_plan.num_resident_blocks >= 4


def test_a_model_that_stays_as_a_whole_has_a_plan_too():
    for model in (nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.ReLU())):
        manager = OffloadTrainingManager(model, "cpu", budget=OffloadBudget(vram_gb=1))
        for _ in range(7):
            manager.after_backward()  # no step: nothing has run
            x = torch.ones(2, WIDTH, requires_grad=True)
            model(x).sum().backward()
            manager.after_backward()
        if any(True for _ in model.parameters()):
            assert manager.residency_plan.num_blocks == 0


def test_a_measurement_that_runs_out_of_memory_is_repeated_with_its_batch(monkeypatch):
    plain, model = Blocks(), Blocks()
    manager = OffloadTrainingManager(model, "cpu", budget=budget(5))
    measure, failures = transfer.Transfer.measure_link, [torch.OutOfMemoryError("planted")]

    def run_out_once(*args, **kwargs):
        if failures:
            raise failures.pop()
        return measure(*args, **kwargs)

    monkeypatch.setattr(transfer.Transfer, "measure_link", run_out_once)
    for seed in range(9):
        actual = retry_on_oom(manager, lambda seed=seed: step(model, manager, seed))
        assert all(torch.equal(a, b) for a, b in zip(actual, step(plain, seed=seed), strict=True))
    assert not failures and manager.tuner.is_done and manager.residency_plan.num_resident_blocks >= 3


def test_only_steps_count():
    model = Blocks()
    manager = OffloadTrainingManager(model, "cpu", budget=budget(5))
    for _ in range(9):
        manager.after_backward()
    assert manager.residency_plan is None
    step(model, manager)
    assert manager.residency_plan is None
    step(model, manager)
    assert manager.residency_plan.num_blocks == COUNT
