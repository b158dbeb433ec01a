"""Weights in quantized blocks: products and gradients of dense ones, and nothing dense is kept."""

from __future__ import annotations

import copy

import pytest
import torch
from comfyui_ferry.core.errors import OffloadError
from comfyui_ferry.core.offload import OffloadTrainingManager, PackedWeight
from ferry_support.adapter_stack import AdapterStack, adapter_gradients
from ferry_support.packed_patchers import random_weight
from torch import nn
from torch.nn.functional import linear

WIDTH = 256


def gradients(weight, x, bias):
    """Return a product, and its gradients by the input and the bias."""
    x, bias = x.detach().requires_grad_(), bias.detach().requires_grad_()
    product = linear(x, weight, bias)
    return product, *torch.autograd.grad(product.square().sum(), (x, bias))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_products_and_gradients_are_those_of_the_dense_weight(dtype):
    weight = random_weight("Q5_K", 64, WIDTH, seed=0).to(dtype)
    assert isinstance(weight, PackedWeight) and weight.dtype == dtype and weight.nbytes == 64 * 176
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(3, 5, WIDTH, generator=draw).to(dtype)
    bias = torch.randn(64, generator=draw).to(dtype)
    for given in (x, x[0], x.transpose(0, 1)):
        for own, expected in zip(
            gradients(weight, given, bias), gradients(weight.dense(), given, bias), strict=True
        ):
            assert torch.equal(own, expected)


def test_roundings_follow_one_another():
    weight = random_weight("Q6_K", 8, WIDTH, seed=0)
    dense = weight.dense()
    for chain in (
        [torch.float32],
        [torch.float16],
        [torch.float32, torch.float16, torch.float32],
        [torch.float32, torch.bfloat16],
    ):
        own, expected = weight, dense
        for dtype in chain:
            own, expected = own.to(dtype), expected.to(dtype)
        assert isinstance(own, PackedWeight) and torch.equal(own.dense(), expected)
    assert type(weight.to(torch.float8_e4m3fn)) is torch.Tensor
    with torch.inference_mode():
        other = weight.to(torch.float32)
    assert isinstance(other, PackedWeight) and other.blocks.data_ptr() == weight.blocks.data_ptr()


def test_everything_else_sees_a_dense_weight_that_cannot_be_written_to():
    weight = nn.Parameter(random_weight("Q4_0", 8, 32, seed=0), requires_grad=False)
    dense = weight.dense()
    assert torch.equal(weight + 1, dense + 1) and torch.equal(weight[2:4].t(), dense[2:4].t())
    assert torch.equal(torch.cat([dense, weight]), torch.cat([dense, dense]))
    assert type(weight.to(torch.bfloat16, copy=True)) is torch.Tensor
    assert torch.equal(torch.zeros_like(dense).copy_(weight), dense)
    for write in (
        lambda: weight.add_(1),
        lambda: weight.copy_(dense),
        lambda: torch.add(dense, 1, out=weight),
        lambda: weight.zero_(),
        lambda: weight.__setitem__(slice(None), dense),
    ):
        with pytest.raises(OffloadError, match="quantized blocks"):
            write()
    assert torch.equal(weight.dense(), dense)
    twin = copy.deepcopy(weight)
    assert isinstance(twin, nn.Parameter) and isinstance(twin, PackedWeight)
    assert torch.equal(twin.dense(), dense) and twin.blocks.data_ptr() != weight.blocks.data_ptr()
    changed = weight.changed(lambda values: values * 2)
    assert torch.equal(changed.dense(), dense * 2) and torch.equal(weight.dense(), dense)
    with pytest.raises(OffloadError, match="trained"):
        linear(dense, nn.Parameter(random_weight("Q4_0", 8, 32, seed=0), requires_grad=True))


def stack(weights, *, checkpointing):
    changes = [lambda _, weight=weight: nn.Parameter(weight, requires_grad=False) for weight in weights]
    return AdapterStack(WIDTH, changes, checkpointing=checkpointing)


@pytest.mark.parametrize("checkpointing", [True, False])
def test_an_offloaded_training_moves_and_keeps_the_blocks_alone(checkpointing):
    weights = [random_weight("Q4_K", WIDTH, WIDTH, seed=seed).to(torch.float32) for seed in range(3)]
    plain = stack([weight.dense() for weight in weights], checkpointing=checkpointing)
    model = stack([weight.clone() for weight in weights], checkpointing=checkpointing)
    expected = adapter_gradients(plain)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda x: x):
        assert all(torch.equal(a, b) for a, b in zip(adapter_gradients(model), expected, strict=True))
    adapters = {block.adapter.weight.data_ptr() for block in model.blocks}
    matrices = [one for one in saved if one.shape == (WIDTH, WIDTH) and one.data_ptr() not in adapters]
    assert all(isinstance(one, PackedWeight) for one in matrices)
    assert matrices or checkpointing  # which has hooks of its own
    manager = OffloadTrainingManager(model, "cpu")
    own_bytes = sum(weight.nbytes for weight in weights)
    assert manager.stats().streamed_bytes == own_bytes
    for _ in range(2):
        before = manager.stats().moved_to_target_bytes
        assert all(torch.equal(a, b) for a, b in zip(adapter_gradients(model), expected, strict=True))
        assert 0 < manager.stats().moved_to_target_bytes - before <= 2 * own_bytes
    manager.remove()
    for block, weight in zip(model.blocks, weights, strict=True):
        assert isinstance(block.base.weight, PackedWeight)
        assert torch.equal(block.base.weight.blocks, weight.blocks)
