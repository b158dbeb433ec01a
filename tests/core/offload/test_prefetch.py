"""Copies start ahead of their use, without more copies and without more memory."""

from __future__ import annotations

import pytest
import torch
from comfyui_ferry.core.offload import OffloadTrainingManager
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH, COUNT = 64, 6
ONE = WIDTH * WIDTH * 4


class Blocks(nn.Module):
    def __init__(self, checkpointing: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(COUNT))
        self.checkpointing = checkpointing
        self.requires_grad_(False)

    def forward(self, x):
        for block in self.blocks:
            if self.checkpointing == "none" or not torch.is_grad_enabled():
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.checkpointing == "reentrant")
        return x


def make(checkpointing="none"):
    torch.manual_seed(0)
    model = Blocks(checkpointing)
    return model, OffloadTrainingManager(model, "cpu")


def step(model):
    x = torch.randn(2, WIDTH, requires_grad=True)
    model(x).square().sum().backward()


def bucket_of(manager, block):
    return manager._engine.store.find(block.weight).bucket


@pytest.mark.parametrize("checkpointing", ["none", "reentrant", "non_reentrant"])
def test_a_step_moves_the_model_twice_and_stays_in_two_slots(checkpointing):
    model, manager = make(checkpointing)
    moved = []
    for _ in range(4):
        before = manager.stats().moved_to_target_bytes
        step(model)
        moved.append(manager.stats().moved_to_target_bytes - before)
        assert manager.resident_bytes == 0
    assert all(amount <= 2 * COUNT * ONE for amount in moved)
    assert manager.stats().peak_resident_bytes <= 2 * ONE
    assert manager.stats().slot_bytes <= 2 * ONE


@pytest.mark.parametrize("checkpointing", ["none", "reentrant", "non_reentrant"])
def test_the_next_block_is_on_its_way_in_forward_and_backward(monkeypatch, checkpointing):
    model, manager = make(checkpointing)
    step(model)
    buckets = [bucket_of(manager, block) for block in model.blocks]
    residency = manager._engine.residency
    loads = []  # (bucket, whether it was loaded because it was needed at once)
    load, fetch = residency._load, residency.fetch
    needed = [False]

    def fetch_at_once(bucket, segment=None):
        needed[0] = True
        try:
            return fetch(bucket, segment)
        finally:
            needed[0] = False

    monkeypatch.setattr(residency, "fetch", fetch_at_once)
    monkeypatch.setattr(residency, "_load", lambda bucket: loads.append((bucket, needed[0])) or load(bucket))
    step(model)
    at_once = [buckets.index(bucket) for bucket, was_needed in loads if was_needed]
    ahead = [buckets.index(bucket) for bucket, was_needed in loads if not was_needed]
    # Only the first of each pass: the forward's, and the backward's (its last block again).
    assert at_once[0] == 0
    assert len(at_once) <= 2
    assert ahead[: COUNT - 1] == list(range(1, COUNT))
    assert len(ahead) >= 2 * COUNT - 3


def test_a_forward_that_ends_early_leaves_nothing_behind():
    model, manager = make()
    with torch.no_grad():
        model(torch.randn(2, WIDTH))
    model.blocks[3].forward = lambda x: (_ for _ in ()).throw(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        model(torch.randn(2, WIDTH))
    assert manager.resident_bytes == 0


def test_another_order_is_only_a_wrong_guess():
    model, manager = make()
    x = torch.randn(2, WIDTH)
    expected = {}
    for name, order in {"up": range(COUNT), "down": reversed(range(COUNT)), "odd": [1, 3, 5]}.items():
        expected[name] = (list(order := list(order)), x)
        for index in order:
            expected[name] = (order, expected[name][1] @ model.blocks[index].weight.T)
    for name in ("up", "down", "odd", "up"):
        order, result = expected[name]
        model.blocks_in_order = order
        with torch.no_grad(), manager.forward_scope():
            y = x
            for index in order:
                y = model.blocks[index](y)
        assert torch.allclose(y, result, rtol=1e-5, atol=1e-6)
        assert manager.resident_bytes == 0


@pytest.mark.parametrize("checkpointing", ["reentrant", "non_reentrant"])
def test_what_a_pass_ended_with_is_not_copied_for_the_next(checkpointing):
    """The slots' blocks are there at the turn, and, where that is asked for, in the next step."""
    for keeps, spared in ((False, 2), (True, 4)):
        model = Blocks(checkpointing)
        manager = OffloadTrainingManager(model, "cpu", prefetch_next_forward=keeps)
        moved = []
        for _ in range(4):
            before = manager.stats().moved_to_target_bytes
            step(model)
            manager.after_backward()
            moved.append((manager.stats().moved_to_target_bytes - before) // ONE)
        assert moved[1:] == [2 * COUNT - spared] * 3
        assert manager.stats().peak_resident_bytes <= 2 * ONE and manager.stats().slot_bytes <= 2 * ONE
        manager.remove()


def test_copies_for_the_next_forward_start_at_the_end_of_a_step_and_no_write_is_missed():
    """As many as fit the limit, frozen ones only; what is written between steps is fetched again."""
    torch.manual_seed(0)
    model = Blocks("non_reentrant")
    model.blocks[1].requires_grad_(True)
    manager = OffloadTrainingManager(model, "cpu", True, prefetch_next_forward=True)
    x = torch.randn(2, WIDTH)

    def assign(block):
        block.weight = nn.Parameter(torch.randn(WIDTH, WIDTH), requires_grad=False)

    def load(block):
        block.load_state_dict({"weight": torch.randn(WIDTH, WIDTH)})

    def rebind(block):
        block.weight.data = torch.randn(WIDTH, WIDTH)

    def write(block):
        block.weight.mul_(2)

    def leave(block):
        pass

    moved = []
    for change in (leave, leave, write, load, rebind, assign, leave):
        before = manager.stats().moved_to_target_bytes
        step(model)
        manager.after_backward()
        moved.append(manager.stats().moved_to_target_bytes - before)
        assert manager.resident_bytes == 2 * ONE
        assert [bucket_of(manager, block).slot is not None for block in model.blocks[:4]] == [1, 0, 1, 0]
        change(model.blocks[0])
        expected = x
        for weight in model.parameters():
            expected = nn.functional.linear(expected, weight.detach().clone())
        with torch.no_grad():
            assert torch.equal(model(x), expected)
    # The first step does not know what comes next.
    assert max(moved[1:]) <= 2 * COUNT * ONE and manager.stats().peak_resident_bytes <= 2 * ONE
    manager.remove()
    assert manager.resident_bytes == 0
