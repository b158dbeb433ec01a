from __future__ import annotations

import torch
from comfyui_ferry.core.offload import OffloadTrainingManager
from comfyui_ferry.core.offload.segments import align
from ferry_support.offload_cases import WIDTH, Int8Weight, Stack, assert_close, inputs
from torch import nn


def buckets(manager):
    return {bucket.name: bucket for bucket in manager._engine.store.buckets}


def test_one_bucket_for_a_unit_and_one_for_what_several_units_share():
    model = Stack(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    model.blocks[1].weight = model.blocks[0].weight
    manager = OffloadTrainingManager(model, "cpu", True)
    found = buckets(manager)
    assert list(found) == ["blocks.0.weight", "blocks.0", "blocks.1", "blocks.2"]
    assert found["blocks.2"].nbytes == align(4 * WIDTH * WIDTH) + align(4 * WIDTH)
    assert found["blocks.0.weight"].nbytes == 4 * WIDTH * WIDTH


def test_what_shares_memory_with_a_trainable_tensor_is_resident():
    model = nn.Linear(WIDTH, WIDTH)
    model.register_buffer("row", model.weight.detach()[0])
    model.register_buffer("other", torch.ones(WIDTH))
    manager = OffloadTrainingManager(model, "cpu")
    stats = manager.stats()
    assert stats.resident_set_bytes == 4 * WIDTH * (WIDTH + 1)
    assert stats.streamed_bytes == 4 * WIDTH
    with torch.no_grad():
        model.weight[0] = 7
    assert torch.equal(model.row, torch.full((WIDTH,), 7.0))


def test_wrappers_that_share_an_inner_tensor_move_together():
    class Uses(nn.Module):
        def __init__(self, weight) -> None:
            super().__init__()
            self.weight = nn.Parameter(weight, requires_grad=False)

        def forward(self, x):
            return torch.nn.functional.linear(x, self.weight)

    def make():
        torch.manual_seed(0)
        scale = torch.rand(WIDTH, 1)
        values = [torch.randint(-9, 9, (WIDTH, WIDTH), dtype=torch.int8) for _ in range(2)]
        return Stack(*(Uses(Int8Weight(value, scale)) for value in values))

    plain, model = make(), make()
    manager = OffloadTrainingManager(model, "cpu")
    assert len(buckets(manager)) == 1
    results = []
    for m in (plain, model):
        x = inputs(0)
        m(x).square().mean().backward()
        results.append(x.grad)
    assert_close(results[1], results[0])
    assert manager.resident_bytes == 0
    manager.remove()
    assert model.blocks[0].weight.scale.data_ptr() == model.blocks[1].weight.scale.data_ptr()
