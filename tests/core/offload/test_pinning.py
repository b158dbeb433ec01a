"""Limits of pinned memory: what fits is pinned, the rest works through the buffers, and it is said."""

from __future__ import annotations

import gc

import pytest
import torch
from comfyui_ferry.core.errors import OffloadError
from comfyui_ferry.core.offload import HostPinning, OffloadTrainingManager, staging
from comfyui_ferry.core.offload.pinned_arena import PinnedArena
from ferry_support.offload_cases import assert_close, build, inputs

LIMIT, INVALID = 2, 1
MB = 2**20


class FakeRegistrar:
    """Pins up to ``limit_bytes``, then fails with ``code``."""

    def __init__(self, limit_bytes=10**18, code=LIMIT):
        self.limit_bytes = limit_bytes
        self.code = code
        self.sizes = {}
        self.num_failed = 0

    def register(self, address, nbytes):
        assert address % 64 == 0 and address not in self.sizes
        if sum(self.sizes.values()) + nbytes > self.limit_bytes:
            self.num_failed += 1
            return self.code
        self.sizes[address] = nbytes
        return 0

    def unregister(self, address):
        del self.sizes[address]
        return 0

    def message(self, code):
        return {LIMIT: "out of memory", INVALID: "invalid argument"}[code]


def fill(pinning, count=4):
    arena = PinnedArena([MB] * count, pin=pinning, chunk_bytes=MB)
    regions = [arena.allocate(MB) for _ in range(count)]
    arena.seal()
    return arena, regions


def test_the_system_refuses_in_the_middle():
    registrar = FakeRegistrar(limit_bytes=2.5 * MB)
    pinning = HostPinning(registrar=registrar)
    arena, regions = fill(pinning)
    assert [region.is_pageable for region in regions] == [False, False, True, True]
    assert arena.pinned_bytes == pinning.pinned_bytes == 2 * MB
    assert registrar.num_failed == 1  # it is not asked again and again
    assert "0.00 GB are not" in pinning.report and "out of memory" in pinning.report
    arena.unpin()
    assert not registrar.sizes and pinning.pinned_bytes == 0


def test_a_budget_is_kept_to():
    registrar = FakeRegistrar()
    pinning = HostPinning(registrar=registrar, budget_bytes=3 * MB)
    _, regions = fill(pinning)
    assert sum(registrar.sizes.values()) == 3 * MB and regions[3].is_pageable
    assert "the budget for pinned memory is" in pinning.report
    del regions, _
    gc.collect()
    assert not registrar.sizes  # memory that is forgotten is unpinned first


def test_another_failure_raises():
    with pytest.raises(OffloadError, match=r"invalid argument \(CUDA error 1\)"):
        fill(HostPinning(registrar=FakeRegistrar(limit_bytes=0, code=INVALID)))


@pytest.mark.parametrize("on_host", [False, True])
def test_training_with_a_part_pinned_is_exact(monkeypatch, on_host):
    """The small buffers are pinned, nothing else is; every copy goes through them in many parts."""
    monkeypatch.setattr(staging, "BUFFER_BYTES", 256)
    registrar = FakeRegistrar(limit_bytes=256 * staging.NUM_BUFFERS)
    parts = []
    run = staging.Stager._run
    monkeypatch.setattr(staging.Stager, "_run", lambda *args: run(*args) or parts.append(1))
    plain, model = (build("modulated adapter", "non_reentrant") for _ in range(2))
    manager = OffloadTrainingManager(model, "cpu", on_host, pinning=HostPinning(registrar=registrar))
    for step in range(2):
        for m in (plain, model):
            m(inputs(step)).square().mean().backward()
    manager.after_backward()
    for mine, expected in zip(model.parameters(), plain.parameters(), strict=True):
        if expected.requires_grad:
            assert_close(mine.grad, expected.grad)
    assert len(parts) >= 8 and all(parts)  # of frozen layers; trained masters are copied at once
    stats = manager.stats()
    assert stats.pinned_bytes == 0 < stats.host_bytes and "are not and stream more slowly" in stats.pinning
    manager.remove()
    assert not registrar.sizes


def test_an_error_of_the_thread_is_raised_where_the_weights_are_needed(monkeypatch):
    model = torch.nn.Linear(8, 8).requires_grad_(False)
    limit = 3 * staging.BUFFER_BYTES
    OffloadTrainingManager(model, "cpu", pinning=HostPinning(registrar=FakeRegistrar(limit_bytes=limit)))

    def fail(*_):
        raise RuntimeError("the link is gone")

    monkeypatch.setattr(staging.Stager, "_run", fail)
    with pytest.raises(RuntimeError, match="the link is gone"):
        model(torch.ones(8))


def test_all_pinned_needs_no_buffers():
    registrar = FakeRegistrar()
    model = torch.nn.Linear(8, 8).requires_grad_(False)
    manager = OffloadTrainingManager(model, "cpu", pinning=HostPinning(registrar=registrar))
    assert sum(registrar.sizes.values()) == manager.stats().pinned_bytes == manager.stats().host_bytes
    model(torch.ones(8))
    manager.remove()
    assert not registrar.sizes
