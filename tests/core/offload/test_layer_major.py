"""Accumulation block by block: the same gradients as in the usual order, for the bytes of one micro-batch."""

from __future__ import annotations

import pytest
import torch
from comfyui_ferry.core.errors import RequestError
from comfyui_ferry.core.offload import BlockSequence, OffloadTrainingManager, backward_layer_major
from ferry_support.offload_cases import WIDTH, assert_close, inputs
from torch import nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    """Takes a stream and a vector that every block uses; a frozen base with an adapter, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down = nn.Linear(WIDTH, 3, bias=False)
        self.up = nn.Linear(3, WIDTH, bias=False)
        self.scale = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, vector):
        h = torch.tanh(x * self.scale(vector))
        return x + nn.functional.dropout(self.base(h) + self.up(self.down(h)), 0.25)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.embed_vector = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, x):
        x, vector, _ = self.head(x).values()
        for block in self.blocks:
            x = checkpoint(block, x, vector, use_reentrant=False)
        return self.out(x).square().mean()

    def head(self, x):
        return {"x": self.embed(x), "vector": self.embed_vector(x), "label": "kept"}

    def sequence(self, scale=1.0):
        return BlockSequence(
            head=self.head,
            blocks=list(self.blocks),
            tail=lambda state, batch: self.out(state["x"]).square().mean() * scale,
            call=lambda block, state: {**state, "x": block(state["x"], state["vector"])},
        )


def build():
    torch.manual_seed(0)
    return Model()


BATCHES = [inputs(step).detach() for step in range(3)]


def by_batches(model):
    """Ordinary accumulation; without dropout, whose random numbers would come in another order."""
    losses = []
    for batch in BATCHES:
        loss = model(batch)
        loss.backward()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize("on_host", [False, True], ids=["resident", "host"])
@pytest.mark.parametrize("threshold", [None, 0.004], ids=["leaf", "block"])
def test_gradients_equal_ordinary_accumulation(threshold, on_host, monkeypatch):
    monkeypatch.setattr(nn.functional, "dropout", lambda x, p: x)
    plain, model = build(), build()
    expected = by_batches(plain)
    manager = OffloadTrainingManager(model, "cpu", on_host, threshold)
    losses = backward_layer_major(manager, model.sequence(), BATCHES)
    manager.after_backward()
    for mine, other in zip(losses, expected, strict=True):
        assert_close(mine, other)
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert (mine.grad is None) == (other.grad is None)
        if other.grad is not None:
            assert_close(mine.grad, other.grad)
    assert manager.resident_bytes == manager.resident_set_bytes


def test_random_numbers_of_the_recompute_are_those_of_the_forward():
    """With dropout, the gradient is that of the loss: checked against a finite difference."""
    model = build().double()
    manager = OffloadTrainingManager(model, "cpu", True)
    batches = [batch.double() for batch in BATCHES]
    weight = model.blocks[1].up.weight

    def total():
        torch.manual_seed(5)
        model.zero_grad()
        return sum(backward_layer_major(manager, model.sequence(), batches))

    total()
    slope = weight.grad[2, 1].item()
    weight.detach()[2, 1] += 1e-6
    high = total()
    weight.detach()[2, 1] -= 2e-6
    low = total()
    # Central difference in fp64: error of order step squared.
    assert abs((high - low).item() / 2e-6 - slope) <= 1e-6 * max(1.0, abs(slope))


@pytest.mark.parametrize("on_host", [False, True], ids=["resident", "host"])
def test_any_number_of_micro_batches_moves_the_bytes_of_one(on_host):
    model = build()
    manager = OffloadTrainingManager(model, "cpu", on_host)

    def moved(run):
        before = manager.stats().moved_to_target_bytes
        run()
        manager.after_backward()
        return manager.stats().moved_to_target_bytes - before

    sequence = model.sequence()
    for _ in range(2):  # the first passes learn the order
        counts = [
            moved(lambda n=n: backward_layer_major(manager, sequence, (BATCHES * 3)[:n])) for n in (1, 2, 7)
        ]
    assert counts[0] == counts[1] == counts[2]
    model(BATCHES[0]).backward()
    assert counts[0] <= moved(lambda: model(BATCHES[0]).backward())


def test_an_error_in_the_middle_leaves_nothing_and_the_next_run_is_right(monkeypatch):
    monkeypatch.setattr(nn.functional, "dropout", lambda x, p: x)
    plain, model = build(), build()
    by_batches(plain)
    manager = OffloadTrainingManager(model, "cpu", True)
    sequence = model.sequence()
    calls, stops = [], [0]

    def fail(block, state):
        calls.append(block)
        if len(calls) == stops[0]:
            raise torch.OutOfMemoryError("planted")
        return sequence.call(block, state)

    for stops[0] in (5, 14):  # in a forward; in a recompute
        calls.clear()
        broken = BlockSequence(sequence.head, sequence.blocks, sequence.tail, fail)
        with pytest.raises(torch.OutOfMemoryError):
            backward_layer_major(manager, broken, BATCHES)
        assert manager.resident_bytes == manager.resident_set_bytes
    model.zero_grad()
    backward_layer_major(manager, sequence, BATCHES)
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        if other.grad is not None:
            assert_close(mine.grad, other.grad)


def test_requests_without_content_are_refused():
    model = build()
    manager = OffloadTrainingManager(model, "cpu", True)
    sequence = model.sequence()
    for broken, batches, words in (
        (sequence, [], "micro-batches"),
        (BlockSequence(sequence.head, [], sequence.tail), BATCHES, "blocks"),
        (BlockSequence(sequence.head, sequence.blocks, lambda s, b: s["x"], sequence.call), BATCHES, "loss"),
    ):
        with pytest.raises(RequestError, match=words):
            backward_layer_major(manager, broken, batches)
