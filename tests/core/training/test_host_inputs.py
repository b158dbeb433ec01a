"""Inputs of checkpointed blocks that wait on the host give the same gradients and leave nothing behind."""

from __future__ import annotations

import gc

import pytest
import torch
from comfyui_ferry.core.training import BlockCheckpointing, find_blocks, host_inputs
from torch import nn

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x, text, table):
        x = x + torch.tanh(self.linear(x)) * table
        return x, text + x.mean()


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(5))

    def forward(self, x, text, table):
        for block in self.blocks:
            x, text = block(x, text, table)
        return x + text


def gradients(model, seed, device, rows=64):
    random = torch.Generator().manual_seed(seed)
    x, text, table = (torch.randn(rows, 16, generator=random).to(device) for _ in range(3))
    x.requires_grad_()
    model.zero_grad()
    model(x, text, table).square().mean().backward()
    return [x.grad, *(parameter.grad.clone() for parameter in model.parameters())]


@pytest.fixture
def everything_is_sent(monkeypatch):
    monkeypatch.setattr(host_inputs, "LEAST_BYTES", 1)


def pair(device):
    torch.manual_seed(0)
    plain, model = Stack().to(device), Stack().to(device)
    model.load_state_dict(plain.state_dict())
    blocks = BlockCheckpointing(find_blocks(model), inputs_on_host=True)
    blocks.install()
    return plain, model, blocks._host_inputs


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_are_equal_and_buffers_used_again(device, everything_is_sent):
    plain, model, owner = pair(device)
    for seed, rows in [(0, 64), (1, 64), (2, 32), (3, 64)]:
        for one, other in zip(
            gradients(model, seed, device, rows), gradients(plain, seed, device, rows), strict=True
        ):
            torch.testing.assert_close(one, other)
    gc.collect()
    # Four blocks' two streams, but for the first text, which needs no gradient; for two sizes.
    assert {len(buffers) for buffers in owner._free.values()} == {7}
    assert len(owner._free) == 2


def test_two_forwards_before_their_backwards(everything_is_sent):
    plain, model, _ = pair("cpu")
    for each in (plain, model):
        each.zero_grad()
        losses = [each(*(torch.full((8, 16), 0.1 * (n + 1)) for _ in range(3))).sum() for n in range(3)]
        for loss in losses:
            loss.backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_a_graph_that_is_kept_can_be_used_again(everything_is_sent):
    _, model, _ = pair("cpu")
    output = model(*(torch.ones(8, 16, requires_grad=True) for _ in range(3))).sum()
    output.backward(retain_graph=True)
    first = [parameter.grad for parameter in model.parameters()]
    model.zero_grad(set_to_none=True)
    output.backward()
    for parameter, expected in zip(model.parameters(), first, strict=True):
        torch.testing.assert_close(parameter.grad, expected, rtol=0, atol=0)


def test_a_write_to_the_input_after_the_block_changes_nothing(everything_is_sent):
    plain, model, _ = pair("cpu")
    results = []
    for each in (plain, model):
        x = torch.ones(8, 16, requires_grad=True) * 1.0
        y, _ = each.blocks[0](x, torch.ones(8, 16), torch.ones(8, 16))
        if each is model:
            with torch.no_grad():
                x.mul_(3)
        y.square().sum().backward()
        results.append(each.get_parameter("blocks.0.linear.weight").grad)
    assert torch.equal(*results)


def test_small_tensors_and_tables_stay():
    _, model, owner = pair("cpu")
    gradients(model, 0, "cpu")
    gc.collect()
    assert owner._free == {}
