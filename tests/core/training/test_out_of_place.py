"""Rewritten functions mean the same, but never write to a tensor."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from comfyui_ferry.core.module_hooks import ModuleHook, hook_names, install_hook, remove_hook
from comfyui_ferry.core.training import OutOfPlace
from comfyui_ferry.core.training.out_of_place import rewrite, update
from torch import nn


def all_operators(x, y):
    x += y
    x -= 0.5
    x *= y
    x /= y
    x **= 2
    return x


def all_methods(x, y):
    x.addcmul_(y, y, value=0.5)
    x.add_(y, alpha=2)
    x.mul_(y).sub_(1)
    x.masked_fill_(x > 3, 3.0)
    x.clamp_(max=2.5)
    return x


def with_list(items, more):
    items += more
    return items


def with_defaults(x, y=1.5, *, z: float = 2.0):
    x += y * z
    return x


def without_update(x):
    x = x + 1
    return x


def on_a_slice(x):
    x[:1] += 1
    return x


@functools.wraps(with_defaults)
def _plain_wrapper(*args, **kwargs):
    return with_defaults(*args, **kwargs)


def decorator(function):
    return function


@decorator
def decorated(x):
    x += 1
    return x


class Private:
    def method(self, x):
        self.__count = 1
        x += self.__count
        return x


def make_closure(factor):
    def inner(x):
        x *= factor
        return x

    def change(value):
        nonlocal factor
        factor = value

    return inner, change


def test_operators_give_the_same_and_write_to_nothing():
    x, y = torch.rand(4) + 1, torch.rand(4) + 1
    before, expected = x.clone(), all_operators(x.clone(), y)
    assert torch.equal(rewrite(all_operators)(x, y), expected)
    assert torch.equal(x, before)
    assert x._version == 0


def test_method_statements_give_the_same_and_write_to_nothing():
    x, y = torch.rand(4) + 1, torch.rand(4) + 1
    rewritten, chained = rewrite(all_methods), x.clone()
    expected = all_methods(x.clone(), y)
    # A chain is an expression on a temporary; it stays, and works on the copies made before it.
    assert torch.equal(rewritten(chained, y), expected)
    assert torch.equal(chained, x)


def test_the_dtype_of_the_left_side_is_kept():
    x, y = torch.ones(3, dtype=torch.bfloat16), torch.rand(3)
    expected = all_operators(x.clone(), y)
    result = rewrite(all_operators)(x, y)
    assert result.dtype == torch.bfloat16
    assert torch.equal(result, expected)


def test_other_objects_are_updated_in_place_as_written():
    items = [1]
    assert rewrite(with_list)(items, [2]) is items
    assert items == [1, 2]
    assert update("Add", 1, 2) == 3


def test_defaults_stay():
    rewritten = rewrite(with_defaults)
    assert float(rewritten(torch.zeros(()))) == 3.0
    assert float(rewritten(torch.zeros(()), 1.0, z=1.0)) == 1.0


def test_closures_are_live():
    inner, change = make_closure(2.0)
    rewritten = rewrite(inner)
    assert float(rewritten(torch.ones(()))) == 2.0
    change(5.0)
    assert float(rewritten(torch.ones(()))) == 5.0


@pytest.mark.parametrize("function", [without_update, on_a_slice, decorated, Private.method, _plain_wrapper])
def test_what_cannot_or_need_not_be_rewritten_is_left(function):
    assert rewrite(function) is None


def test_an_error_points_at_the_original_line():
    rewritten = rewrite(with_defaults)
    assert rewritten.__code__.co_filename == with_defaults.__code__.co_filename
    with pytest.raises(RuntimeError) as caught:
        rewritten(torch.zeros(2), torch.zeros(3))
    line = next(entry.lineno for entry in caught.traceback if entry.name == "with_defaults")
    assert line == with_defaults.__code__.co_firstlineno  # counted from 0: the line after the def


class Base(nn.Module):
    def shift(self, x):
        x += 1
        return x


class Block(Base):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def shift(self, x):
        x *= 2
        return super().shift(x)

    def forward(self, x):
        x += torch.tanh(self.linear(x))
        return self.shift(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def state(model):
    return {path: dict(module.__dict__) for path, module in model.named_modules()}


def test_a_model_that_writes_in_place_gets_right_gradients():
    torch.manual_seed(0)
    model, x = Model(), torch.randn(3, 4)
    with torch.no_grad():
        expected = model(x.clone())
    with pytest.raises(RuntimeError, match=r"in.?place"):
        model(x.clone().requires_grad_() * 1).sum().backward()
    rewriting = OutOfPlace(model)
    rewriting.install()
    assert len(rewriting) == 4  # forward and shift of two blocks
    leaf = x.clone().requires_grad_()
    output = model(leaf)
    assert torch.equal(output, expected)
    output.square().sum().backward()
    reference = x.clone().requires_grad_()
    value = reference
    for block in model.blocks:
        value = (value + torch.tanh(block.linear(value))) * 2 + 1
    value.square().sum().backward()
    assert torch.equal(leaf.grad, reference.grad)


def test_removal_leaves_nothing():
    model = Model()
    before = state(model)
    rewriting = OutOfPlace(model)
    rewriting.install()
    assert state(model) != before
    rewriting.remove()
    assert state(model) == before


def test_it_is_innermost_among_other_hooks():
    model, seen = Model(), []

    class Watch(ModuleHook):
        def run(self, forward, module, args, kwargs):
            seen.append(type(module).__name__)
            return forward(*args, **kwargs)

    install_hook(model.blocks[0], "watch", Watch())
    rewriting = OutOfPlace(model)
    rewriting.install()
    assert hook_names(model.blocks[0]) == ["watch", "out_of_place"]
    x = torch.randn(2, 4)
    before = x.clone()
    model(x)
    assert seen == ["Block"]
    assert torch.equal(x, before)
    rewriting.remove()
    remove_hook(model.blocks[0], "watch")


def test_a_forward_that_other_code_replaced_is_left():
    model = Model()
    replaced = model.blocks[0].forward = lambda x: x * 3
    rewriting = OutOfPlace(model)
    rewriting.install()
    assert model.blocks[0].forward is replaced
    rewriting.remove()
    assert model.blocks[0].__dict__["forward"] is replaced


def test_a_copy_of_a_rewritten_model_works():
    model, x = Model(), torch.randn(2, 4)
    expected = model(x.clone())
    rewriting = OutOfPlace(model)
    rewriting.install()
    copied = copy.deepcopy(model)
    assert torch.equal(copied(x.clone()), expected)
