"""Every word of the tensor vocabulary on a model that uses all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from comfyui_ferry.core.errors import PlanError, RequestError
from comfyui_ferry.core.module_hooks import hook_names
from comfyui_ferry.core.parallel import ModelPlan, ParallelMethod, parallelize
from comfyui_ferry.core.parallel.tensor_parallel import NormAcrossRanksHook, SumOutputHook
from comfyui_ferry.core.parallel.tensor_plan import (
    ColumnParallel,
    EmbeddingColumn,
    GatheredColumn,
    LocalArgument,
    LocalAttribute,
    NormAcrossRanks,
    RowParallel,
    TensorPlan,
    Unit,
)
from ferry_support.parity import TOLERANCE, relative_error, world_group
from ferry_support.ranks import run_ranks
from ferry_support.tensor_parity import plain_attributes
from ferry_support.tiny_models import noise, randomize
from torch import nn
from torch.nn import functional as F

HEADS, WIDTH, CHANNELS = 5, 4, 20


class Mixer(nn.Module):
    """Attention with a position bias of each head, a norm over all heads, and modulation."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = HEADS
        self.q, self.kv = nn.Linear(CHANNELS, CHANNELS), nn.Linear(CHANNELS, 2 * CHANNELS)
        self.norm = nn.RMSNorm(CHANNELS, eps=1e-3)
        self.bias = nn.Embedding(7, HEADS)
        self.out = nn.Linear(CHANNELS, CHANNELS)
        self.modulation = nn.Linear(CHANNELS, CHANNELS)

    def forward(self, x, positions, vector):
        q, (k, v) = self.norm(self.q(x)), self.kv(x).chunk(2, -1)
        q, k, v = (tensor.unflatten(-1, (self.heads, -1)).transpose(1, 2) for tensor in (q, k, v))
        distance = torch.arange(x.shape[1])[:, None] % 7
        mask = self.bias(distance).permute(2, 0, 1).expand(-1, -1, x.shape[1])
        mixed = F.scaled_dot_product_attention(q * positions[0], k, v, attn_mask=mask)
        return self.out(mixed.transpose(1, 2).flatten(2)) * self.modulation(vector)[:, None]


PLAN = ModelPlan(
    name="Mixer",
    class_path=f"{Mixer.__module__}.Mixer",
    heads="heads",
    rules=(),
    methods=frozenset({ParallelMethod.TENSOR}),
    tensor=TensorPlan(
        units=(
            Unit("heads", channels="q.out_features", count="heads"),
            Unit("biases", channels="heads", count="heads"),
        ),
        rules=(
            ColumnParallel("q", parts=("heads",)),
            ColumnParallel("kv", parts=("heads", "heads")),
            NormAcrossRanks("norm", parts=("heads",)),
            LocalAttribute("", name="heads", unit="heads"),
            LocalArgument("", argument="positions", unit="heads"),
            EmbeddingColumn("bias", parts=("biases",)),
            RowParallel("out", parts=("heads",)),
            GatheredColumn("modulation"),
        ),
    ),
)


def call() -> tuple[torch.Tensor, tuple, torch.Tensor]:
    return noise(2, 9, CHANNELS), (noise(1, HEADS, 1, WIDTH), "kept"), noise(2, CHANNELS)


def build() -> Mixer:
    return randomize(Mixer())  # type: ignore[return-value]


@pytest.mark.parametrize("world_size", [2, 3])
def test_parts_of_the_weights_give_what_the_whole_ones_give(world_size: int) -> None:
    def rank() -> dict[str, Any]:
        model = build()
        attributes, parameters = plain_attributes(model), dict(model.named_parameters())
        with torch.inference_mode():
            reference = model(*call())
            handle = parallelize(model, PLAN, tensor_group=world_group())
            outputs = [handle.run(model, *call()), model(*call())]
            with pytest.raises(PlanError, match="parallel already"):
                parallelize(model, PLAN, tensor_group=world_group())
            changed = plain_attributes(model) != attributes
            handle.remove()
            handle.remove()
            # fp32: the ranks' sums in another order.
            assert max(relative_error(output, reference) for output in outputs) <= TOLERANCE
            assert changed
            assert torch.equal(model(*call()), reference)
        assert plain_attributes(model) == attributes
        assert all(parameters[name] is parameter for name, parameter in model.named_parameters())
        assert not any(hook_names(module) for module in model.modules())
        return {}

    run_ranks(rank, world_size)


@pytest.mark.parametrize("broken", [SumOutputHook, NormAcrossRanksHook])
def test_without_communication_the_result_is_wrong(broken: type) -> None:
    def rank() -> float:
        broken.run = lambda self, forward, module, args, kwargs: forward(*args, **kwargs)
        model = build()
        with torch.inference_mode():
            reference = model(*call())
            handle = parallelize(model, PLAN, tensor_group=world_group())
            return relative_error(handle.run(model, *call()), reference)

    assert min(run_ranks(rank, 2)) > 1e-2


def test_more_ranks_than_heads_and_odd_arguments_are_refused() -> None:
    def rank() -> None:
        x, _, vector = call()
        model = build()
        parallelize(model, PLAN, tensor_group=world_group())
        with torch.inference_mode(), pytest.raises(PlanError, match="is not cut by heads"):
            model(x, (noise(1, 4, 1, WIDTH),), vector)
        few = build()
        few.heads = 1
        with pytest.raises(RequestError, match="from 1 to 1"):
            parallelize(few, PLAN, tensor_group=world_group())

    run_ranks(rank, 2)
