"""Out of memory at any phase: the batch is repeated, with the numbers of a run that had enough."""

from __future__ import annotations

import pytest
import torch
from comfyui_ferry.core.errors import OffloadError, RequestError
from comfyui_ferry.core.offload import OffloadTrainingManager, retry_on_oom
from comfyui_ferry.core.offload.tuner import set_kept
from ferry_support.offload_cases import WIDTH, assert_close, inputs
from torch import nn
from torch.utils.checkpoint import checkpoint


class Faulty(torch.autograd.Function):
    """Passes its input on; out of memory in the backward when told."""

    @staticmethod
    def forward(ctx, x, plan):
        ctx.plan = plan
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.plan.visit("backward")
        return gradient, None


class Faults:
    """Raises at chosen visits of a phase: 0 is the first visit."""

    def __init__(self, **visits):
        self.left = {phase: list(numbers) for phase, numbers in visits.items()}
        self.count = dict.fromkeys(("forward", "recompute", "backward", "optimizer"), 0)

    def visit(self, phase):
        number, self.count[phase] = self.count[phase], self.count[phase] + 1
        if number in self.left.get(phase, ()):
            raise torch.OutOfMemoryError(f"planted in {phase}")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("last", torch.zeros(WIDTH))
        self.faults = Faults()

    def run_block(self, block, x):
        is_recompute = torch._C._current_graph_task_id() != -1
        self.faults.visit("recompute" if is_recompute else "forward")
        return Faulty.apply(x + torch.dropout(block(x), 0.3, True), self.faults)

    def forward(self, x):
        self.calls += 1
        x = self.norm(self.frozen(x)) + self.last
        self.last = x.detach().mean(0)
        for block in self.blocks:
            x = checkpoint(self.run_block, block, x, use_reentrant=False)
        return x.square().mean()


def train(faults=None, *, on_host=True, retries=True, steps=3, **options):
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    manager = OffloadTrainingManager(model, "cpu", on_host)
    torch.manual_seed(1)
    losses = []

    def forward_backward(step):
        losses_of_step = []
        for micro in range(2):
            loss = model(inputs(2 * step + micro).detach())
            loss.backward()
            losses_of_step.append(loss.detach())
        manager.after_backward()
        return torch.stack(losses_of_step)

    inner = optimizer._init_group

    def init_group(*args):
        result = inner(*args)
        model.faults.visit("optimizer")
        return result

    optimizer._init_group = init_group
    for step in range(steps):
        model.faults = faults if faults is not None and step == 1 else Faults()
        if retries:
            losses.append(
                retry_on_oom(manager, lambda s=step: forward_backward(s), optimizer=optimizer, **options)
            )
        else:
            losses.append(forward_backward(step))
            optimizer.step()
        optimizer.zero_grad()
        assert manager.resident_bytes == manager.resident_set_bytes
    return model, optimizer, losses


@pytest.mark.parametrize("on_host", [False, True], ids=["resident", "host"])
def test_every_phase(on_host):
    expected, expected_optimizer, expected_losses = train(on_host=on_host, retries=False)
    for visits in ({"forward": [2, 9]}, {"recompute": [2]}, {"backward": [5]}, {"optimizer": [0]}):
        faults = Faults(**visits)
        model, optimizer, losses = train(faults, on_host=on_host)
        assert all(faults.count[phase] > max(numbers) for phase, numbers in visits.items())
        assert_close(torch.stack(losses), torch.stack(expected_losses))
        for mine, other in zip(model.state_dict().values(), expected.state_dict().values(), strict=True):
            assert_close(mine, other)
        for mine, other in zip(model.parameters(), expected.parameters(), strict=True):
            for name, value in expected_optimizer.state[other].items() if other.requires_grad else ():
                assert_close(optimizer.state[mine][name], value)


def test_gradients_from_before_are_kept():
    results = []
    for faults in (Faults(), Faults(backward=[2])):
        torch.manual_seed(0)
        model = Model()
        manager = OffloadTrainingManager(model, "cpu", True)
        for step in range(2):
            model.faults = faults if step else Faults()
            retry_on_oom(manager, lambda m=model, s=step: m(inputs(s).detach()).backward())
            gradient = model.blocks[0].weight.grad
        results.append(gradient)
    assert_close(results[1], results[0])


def test_less_stays_at_every_retry_until_nothing_is_left():
    model = Model()
    manager = OffloadTrainingManager(model, "cpu", False)
    engine = manager._engine
    frozen = [bucket for bucket in engine.store.buckets if "frozen" in bucket.name]
    set_kept(engine, frozen, cache_limit_bytes=4 * frozen[0].nbytes)
    model(inputs(0)).backward()
    assert manager.resident_set_bytes > engine.residency.resident_set_bytes
    rooms = []

    def always_too_much():
        rooms.append((engine.residency.kept_bytes > 0, engine.residency.cache_limit_bytes))
        raise torch.OutOfMemoryError("the original")

    with pytest.raises(torch.OutOfMemoryError, match="the original"):
        retry_on_oom(manager, always_too_much)
    one = frozen[0].nbytes
    assert rooms == [(True, 4 * one), (False, 4 * one), (False, 2 * one), (False, one), (False, 0)]
    model(inputs(1)).backward()  # slower, but it runs


def test_a_step_half_done_is_repeated_from_copies_or_not_at_all(monkeypatch):
    def late(*args, **kwargs):
        if not planted:
            planted.append(True)
            fused(*args, **kwargs)
            raise torch.OutOfMemoryError("after the update")
        return fused(*args, **kwargs)

    fused, planted = torch._fused_adamw_, []
    expected, *_ = train(retries=False, steps=1)
    monkeypatch.setattr(torch, "_fused_adamw_", late)
    with pytest.raises(OffloadError, match="snapshot_optimizer"):
        train(steps=1)
    planted.clear()
    model, *_ = train(steps=1, snapshot_optimizer=True)
    for mine, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert_close(mine.detach(), other.detach())


def test_what_cannot_be_undone_is_refused():
    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))
            self.register_buffer("table", torch.zeros(2**18 + 1))

        def forward(self):
            self.table.add_(1)
            return (self.table.sum() * self.weight).sum()

    model = Writes()
    manager = OffloadTrainingManager(model, "cpu", True)

    def run():
        model().backward()
        raise torch.OutOfMemoryError("planted")

    with pytest.raises(OffloadError, match="table"):
        retry_on_oom(manager, run)
    manager.overlap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(RequestError, match="overlapped"):
        retry_on_oom(manager, run)
