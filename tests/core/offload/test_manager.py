"""The promise of the engine: the same numbers as the plain model, and nothing left on the target."""

from __future__ import annotations

import functools

import pytest
import torch
from comfyui_ferry.core.offload import OffloadTrainingManager
from comfyui_ferry.core.offload.segments import ALIGNMENT_BYTES
from ferry_support.offload_cases import CASES, assert_same_run, build, train

# In MB: whole blocks of the cases (some kilobytes) move at once with the larger one.
THRESHOLDS = {"leaf": None, "small": 0.002, "whole": 1.0}


OPTIMIZERS = {"none": "SGD", "reentrant": "AdamW", "non_reentrant": "AdamW"}


@functools.cache
def plain_run(name, checkpointing):
    return train(build(name, checkpointing), optimizer=OPTIMIZERS[checkpointing])


@pytest.mark.parametrize("checkpointing", OPTIMIZERS)
@pytest.mark.parametrize("optimizer_on_host", [False, True], ids=["resident", "host"])
@pytest.mark.parametrize("threshold", THRESHOLDS)
@pytest.mark.parametrize("name", CASES)
def test_training_equals_the_plain_model(name, threshold, optimizer_on_host, checkpointing):
    model = build(name, checkpointing)
    manager = OffloadTrainingManager(model, "cpu", optimizer_on_host, THRESHOLDS[threshold])

    def nothing_leaked():
        assert manager.resident_bytes == manager.resident_set_bytes

    optimizer = OPTIMIZERS[checkpointing]
    actual = train(model, manager, optimizer=optimizer, after_each_backward=nothing_leaked)
    assert_same_run(actual, plain_run(name, checkpointing))


@pytest.mark.parametrize("on_host", [True, False])
def test_a_training_loop_needs_three_lines(on_host):
    """The usual loop: move nothing, attach, and one call after the backward."""

    class ToyModel(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(10))

        def forward(self, x):
            for layer in self.layers:
                x = x + layer(torch.nn.functional.layer_norm(x, (64,)))
            return x

    losses = []
    for managed in (False, True):
        torch.manual_seed(0)
        model = ToyModel().to("cpu")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        if managed:
            offload_manager = OffloadTrainingManager(
                model, target_device="cpu", enable_optimizer_cpu_offload=on_host
            )
        for _ in range(5):
            x = torch.randn((8, 64), device="cpu")
            loss = torch.nn.functional.mse_loss(model(x), x + 1)
            loss.backward()
            if managed:
                offload_manager.after_backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[5:] == losses[:5]
    stats = offload_manager.stats()
    layer = 64 * 65 * 4
    assert stats.resident_bytes == stats.resident_set_bytes == (0 if on_host else 10 * layer)
    if on_host:
        assert stats.peak_resident_bytes <= 3 * layer
        assert stats.moved_to_host_bytes == 5 * 10 * layer


def test_stats_add_up():
    model = build("residual").requires_grad_(False)
    manager = OffloadTrainingManager(model, "cpu", False, 0.002)
    total = sum(p.numel() * 4 for p in model.parameters())
    stats = manager.stats()
    assert stats.streamed_bytes == total and stats.resident_set_bytes == 0
    assert total <= stats.host_bytes <= total + ALIGNMENT_BYTES * len(list(model.parameters()))
    assert (stats.num_units, stats.num_buckets, stats.pinned_bytes) == (8, 8, 0)
    with torch.no_grad():
        model(torch.ones(2, 16))
    assert manager.stats().moved_to_target_bytes == stats.host_bytes
    whole = OffloadTrainingManager(model, "cpu", False, 1.0).stats()
    assert (whole.num_units, whole.num_buckets) == (1, 1)
