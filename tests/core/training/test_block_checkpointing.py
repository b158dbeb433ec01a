"""Checkpointed blocks give the same outputs and gradients, and keep only their inputs."""

from __future__ import annotations

import weakref

import pytest
import torch
from comfyui_ferry.core.errors import TrainingError
from comfyui_ferry.core.training import BlockCheckpointing, find_blocks
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.dropout = nn.Dropout(0.5)
        self.calls = 0

    def forward(self, x, extra=None, options=None):
        self.calls += 1
        return x + self.dropout(torch.tanh(self.linear(x)))


class PairBlock(Block):
    """Takes and returns nested structures, as joint text and image blocks do."""

    def forward(self, pair, *, vec, options):
        image, text = pair
        image = image + torch.tanh(self.linear(image)) * vec["scale"]
        text = text + self.linear(text) * options["strength"]
        return (image, text), {"count": len(pair), "ids": torch.arange(3)}


class InPlaceBlock(Block):
    def forward(self, x, extra=None, options=None):
        x.add_(torch.tanh(self.linear(x)))
        return x


class SilentBlock(Block):
    """Changes a tensor that its own backward needs; only autograd can see it."""

    def forward(self, x, extra=None, options=None):
        hidden = torch.tanh(self.linear(x))
        hidden.mul_(2)
        return x + hidden


class Stack(nn.Module):
    def __init__(self, block=Block, count=3):
        super().__init__()
        self.blocks = nn.ModuleList([block() for _ in range(count)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def checkpointed(model):
    blocks = BlockCheckpointing(find_blocks(model))
    blocks.install()
    return blocks


def gradients(model, x):
    model.zero_grad(set_to_none=True)
    output = model(x)
    output.square().sum().backward()
    return output.detach(), [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("needs_input_gradient", [False, True])
def test_outputs_and_gradients_are_equal(needs_input_gradient):
    torch.manual_seed(0)
    model = Stack().eval()
    x = torch.randn(5, 4, requires_grad=needs_input_gradient)
    expected = gradients(model, x)
    expected_input, x.grad = x.grad, None
    blocks = checkpointed(model)
    actual = gradients(model, x)
    assert torch.equal(actual[0], expected[0])
    assert all(torch.equal(a, b) for a, b in zip(actual[1], expected[1], strict=True))
    if needs_input_gradient:
        assert torch.equal(x.grad, expected_input)
    # Once, then forward and again; the last one is where the backward begins, so it keeps what it made.
    assert [block.calls for block in model.blocks] == [3, 3, 2]
    blocks.remove()
    assert "forward" not in model.blocks[0].__dict__


def test_a_first_block_without_any_gradient_at_its_input_learns():
    model = Stack(count=2).eval()
    checkpointed(model)
    _, (weight, bias, *_) = gradients(model, torch.randn(5, 4))
    assert weight.any()
    assert bias.any()


def test_dropout_falls_the_same_way_again():
    torch.manual_seed(0)
    model, x = Stack().train(), torch.randn(5, 4)
    torch.manual_seed(1)
    expected = gradients(model, x)
    checkpointed(model)
    torch.manual_seed(1)
    actual = gradients(model, x)
    assert torch.equal(actual[0], expected[0])
    assert all(torch.equal(a, b) for a, b in zip(actual[1], expected[1], strict=True))


def test_nested_arguments_and_results_keep_their_gradients():
    torch.manual_seed(0)
    model = Stack(PairBlock, count=2)
    block = model.blocks[0]
    image, text = torch.randn(2, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    scale = torch.tensor(0.5, requires_grad=True)

    def run():
        for leaf in (image, text, scale):
            leaf.grad = None
        (out_image, out_text), rest = block(
            (image, text), vec={"scale": scale}, options={"strength": 2.0, "name": "x"}
        )
        (out_image.sum() + out_text.square().sum()).backward()
        return rest, [leaf.grad.clone() for leaf in (image, text, scale)]

    _, expected = run()
    checkpointed(model)
    rest, actual = run()
    assert rest["count"] == 2
    assert torch.equal(rest["ids"], torch.arange(3))
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_an_unused_output_gives_no_gradient_instead_of_zeros():
    model = Stack(PairBlock, count=2)
    checkpointed(model)
    image, text = torch.randn(2, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    (out_image, _), _ = model.blocks[0](
        (image, text), vec={"scale": torch.tensor(1.0)}, options={"strength": 2.0}
    )
    out_image.sum().backward()
    assert image.grad is not None
    assert text.grad is None


def test_a_block_that_changes_its_input_is_refused():
    model = Stack(InPlaceBlock)
    checkpointed(model)
    with pytest.raises(TrainingError, match=r"blocks\.0 changes its input in place"):
        model(torch.randn(2, 4))


def test_a_change_that_breaks_the_backward_is_not_silent():
    model = Stack(SilentBlock)
    checkpointed(model)
    output = model(torch.randn(2, 4))
    with pytest.raises(RuntimeError, match=r"in.?place"):
        output.sum().backward()


def test_a_change_at_a_later_call_is_not_silent():
    class Later(Block):
        def forward(self, x, extra=None, options=None):
            self.calls += 1
            return self.linear(x.add_(1) if self.calls > 2 else x)

    model = Stack(Later)
    checkpointed(model)
    model(torch.randn(2, 4)).sum().backward()
    with pytest.raises(RuntimeError, match=r"in.?place"):
        model(torch.randn(2, 4)).sum().backward()


@pytest.mark.parametrize("first", [True, False])
def test_a_block_that_returns_its_input(first):
    class Passing(nn.Module):
        def forward(self, x, extra=None, options=None):
            return x

    model = Stack()
    model.blocks[0] = Passing()
    x = torch.randn(2, 4)
    expected = gradients(model.eval(), x)
    checkpointed(model)
    for _ in range(1 if first else 2):
        actual = gradients(model, x)
    assert torch.equal(actual[0], expected[0])


def test_inputs_are_let_go_as_the_backward_goes_on():
    """Each block's inputs are freed after its backward, while the output is still held."""
    alive, kept = [], []

    class Watching(Block):
        def forward(self, x, extra=None, options=None):
            if not torch.is_grad_enabled():
                kept.append(weakref.ref(x.untyped_storage()))
            alive.append(sum(ref() is not None for ref in kept))
            return super().forward(x)

    model = Stack(Watching, count=5)
    checkpointed(model)
    for _ in range(2):  # the first step works on copies
        alive.clear(), kept.clear()
        output = model(torch.randn(2, 4))
        loss = output.sum()
        loss.backward()
        assert alive[4:] == sorted(alive[4:], reverse=True) and alive[-1] <= 1


def test_an_input_changed_after_the_block_is_not_silent():
    model = Stack(count=2)
    checkpointed(model)
    x = torch.randn(2, 4)
    output = model(x)
    x.add_(1)
    with pytest.raises(RuntimeError, match=r"in.?place"):
        output.sum().backward()


def test_the_caller_may_write_to_the_output():
    torch.manual_seed(0)
    model = Stack(PairBlock, count=2).eval()
    checkpointed(model)
    (image, text), _ = model.blocks[0](
        (torch.randn(2, 4), torch.randn(2, 4)), vec={"scale": torch.tensor(1.0)}, options={"strength": 1.0}
    )
    image += 1
    (image.sum() + text.sum()).backward()
    assert model.blocks[0].linear.weight.grad is not None


def test_without_gradients_a_block_is_called_as_usual():
    model, x = Stack().eval(), torch.randn(2, 4)
    expected = model(x)
    checkpointed(model)
    with torch.no_grad():
        assert torch.equal(model(x), expected)
    assert [block.calls for block in model.blocks] == [2, 2, 2]


def test_nothing_but_inputs_is_kept():
    kept = []

    class Watching(Block):
        def forward(self, x, extra=None, options=None):
            hidden = self.linear(x)
            kept.append(weakref.ref(hidden))
            return x + torch.tanh(hidden) * hidden

    model = Stack(Watching)
    output = model(torch.randn(2, 4))
    assert any(ref() is not None for ref in kept)
    kept.clear()
    checkpointed(model)
    output = model(torch.randn(2, 4))
    assert [ref() is None for ref in kept] == [True, True, False]
    output.sum().backward()


def test_autocast_is_the_same_in_the_recomputation():
    torch.manual_seed(0)
    model, x = Stack().eval(), torch.randn(5, 4)

    def run():
        model.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = model(x)
        output.float().square().sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    expected = run()
    checkpointed(model)
    # The weight's cast is cached over the whole forward in one case only: equal up to bf16 rounding.
    for actual, plain in zip(run(), expected, strict=True):
        torch.testing.assert_close(actual, plain, rtol=2e-2, atol=2e-2)


class Stop(BaseException):
    pass


def test_an_exception_in_the_recomputation_comes_through_as_it_is():
    class Stopping(Block):
        def forward(self, x, extra=None, options=None):
            if torch.is_grad_enabled():
                raise Stop
            return super().forward(x)

    model = Stack(Stopping)
    model.blocks[-1] = Block()
    blocks = checkpointed(model)
    output = model(torch.randn(2, 4))
    with pytest.raises(Stop):
        output.sum().backward()
    blocks.remove()
    assert "forward" not in model.blocks[0].__dict__


def test_tensors_from_inference_mode_may_be_passed():
    with torch.inference_mode():
        table = torch.ones(4)

    class WithTable(Block):
        def forward(self, x, table):
            return x + self.linear(x) * table

    model = Stack(WithTable, count=2)
    checkpointed(model)
    model.blocks[0](torch.randn(2, 4), table.clone()).sum().backward()
    assert model.blocks[0].linear.weight.grad is not None


def test_a_block_that_computes_something_else_again_is_refused():
    class Drifting(Block):
        def forward(self, x, extra=None, options=None):
            self.calls += 1
            return x + self.linear(x) * self.calls

    model = Stack(Drifting)
    checkpointed(model)
    with pytest.raises(TrainingError, match=r"the block blocks\.1 gives another output"):
        model(torch.randn(5, 4)).sum().backward()
