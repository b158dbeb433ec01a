"""Bases that stay quantized in the arena and on the link, and blocks that are compiled."""

from __future__ import annotations

import pytest
import torch
from comfyui_ferry.core.offload import OffloadTrainingManager
from ferry_support.adapter_stack import AdapterStack, adapter_gradients
from torch import nn
from torch.utils._python_dispatch import return_and_correct_aliasing

WIDTH, BLOCKS = 32, 3


class ScaledWeight(torch.Tensor):
    """A weight as quantized layouts keep it: small codes and scales; it becomes dense where it is used."""

    @staticmethod
    def __new__(cls, codes, scales):
        size = torch.Size((codes.shape[0], scales.shape[1] * (codes.shape[1] // scales.shape[1])))
        return torch.Tensor._make_wrapper_subclass(cls, size, dtype=torch.float32, device=codes.device)

    def __init__(self, codes, scales):
        self.codes, self.scales = codes, scales

    def __tensor_flatten__(self):
        return ["codes", "scales"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        return cls(inner["codes"], inner["scales"])

    def dense(self):
        groups = self.codes.to(torch.float32).unflatten(1, (self.scales.shape[1], -1))
        return (groups * self.scales[..., None]).flatten(1)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            result = cls(args[0].codes, args[0].scales)
            return return_and_correct_aliasing(function, args, kwargs, result)
        plain = torch.utils._pytree.tree_map(lambda x: x.dense() if isinstance(x, cls) else x, args)
        return function(*plain, **kwargs)


def quantize(weight, dtype, groups):
    """``groups`` of one row share a scale: 1 as in scaled fp8, more as in GGUF's blocks."""
    parts = weight.detach().unflatten(1, (groups, -1))
    scales = parts.abs().amax(-1) / (100.0 if dtype is torch.int8 else 200.0)
    codes = (parts / scales[..., None]).flatten(1)
    codes = codes.round() if dtype is torch.int8 else codes
    return nn.Parameter(ScaledWeight(codes.to(dtype), scales), requires_grad=False)


def stack(dtype=None, groups=1, *, checkpointing=True):
    def change(weight):
        return weight if dtype is None else quantize(weight, dtype, groups)

    return AdapterStack(WIDTH, [change] * BLOCKS, checkpointing=checkpointing)


@pytest.mark.parametrize(("dtype", "groups"), [(torch.float8_e4m3fn, 1), (torch.int8, 1), (torch.int8, 4)])
def test_a_quantized_base_moves_as_it_is(dtype, groups):
    plain, model = stack(dtype, groups), stack(dtype, groups)
    manager = OffloadTrainingManager(model, "cpu")
    own_bytes = BLOCKS * (WIDTH * WIDTH + WIDTH * groups * 4)
    assert manager.stats().streamed_bytes == own_bytes
    for _ in range(2):
        before = manager.stats().moved_to_target_bytes
        assert all(
            torch.equal(a, b) for a, b in zip(adapter_gradients(model), adapter_gradients(plain), strict=True)
        )
        # Forward and backward; alignment is all that is added.
        assert manager.stats().moved_to_target_bytes - before <= 2 * (own_bytes + 2 * 64 * BLOCKS)
    manager.remove()
    assert type(model.blocks[0].base.weight.data) is ScaledWeight
    assert torch.equal(model.blocks[0].base.weight.codes, plain.blocks[0].base.weight.codes)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_compiled_blocks_train_alike(checkpointing):
    """The graphs run as they were traced: tracing around the hooks is what could go wrong, not kernels."""
    traced = []

    def backend(graph, example_inputs):
        traced.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    plain, model = stack(checkpointing=checkpointing), stack(checkpointing=checkpointing)
    manager = OffloadTrainingManager(model, "cpu")
    for block in model.blocks:
        block.compile(backend=backend)
    try:
        for _ in range(2):
            assert all(
                torch.equal(a, b)
                for a, b in zip(adapter_gradients(model), adapter_gradients(plain), strict=True)
            )
            assert manager.resident_bytes == manager.resident_set_bytes
        assert any("tanh" in target for target in traced)  # layers with hooks run as they are
    finally:
        torch._dynamo.reset()
