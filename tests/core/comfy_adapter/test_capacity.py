"""What does not fit is refused with the numbers, before a process starts or a weight is loaded."""

from __future__ import annotations

import pytest
from comfyui_ferry.core.comfy_adapter import capacity, close_workers
from comfyui_ferry.core.comfy_adapter.worker_room import ModelNeeds, StreamRequest, weight_room
from comfyui_ferry.core.errors import RequestError
from comfyui_ferry.core.workers import WorkerPool
from ferry_support.sampling import ULYSSES_2, parallel, sample
from ferry_support.tiny_patchers import PATCHERS

pytestmark = [pytest.mark.comfy, pytest.mark.timeout(60)]
GIB = 1 << 30


def test_a_host_that_is_full_is_told_before_any_worker_starts(monkeypatch):
    close_workers()
    monkeypatch.setattr(capacity, "available_host_bytes", lambda: GIB // 4)
    monkeypatch.setattr(capacity, "file_backed_bytes", lambda tensors: 2 * GIB)
    monkeypatch.setattr(WorkerPool, "start", lambda *a, **k: pytest.fail("a worker was started"))
    with pytest.raises(RequestError, match=r"takes 2.6 GiB of host memory \(2.0 GiB.*0.2 GiB are available"):
        sample(parallel(PATCHERS["wan"].build(), ULYSSES_2), "wan")


def test_a_full_gpu_is_named_and_one_with_some_room_streams():
    needs = ModelNeeds(10 * GIB, 3 * GIB, GIB, StreamRequest())
    gpus = ("GPU-a", "GPU-b")
    with pytest.raises(
        RequestError, match=r"10.00 GiB of weights on GPU-b .*3.00 GiB.*3.50 GiB are free.*fp8"
    ):
        weight_room(needs, {0: 40 * GIB, 1: 7 * GIB // 2}, gpus)
    assert weight_room(needs, {0: 40 * GIB, 1: None}, ("GPU-a", "cpu")) is None
    assert weight_room(needs, {0: 40 * GIB, 1: 9 * GIB}, gpus) == 8 * GIB
    limited = ModelNeeds(10 * GIB, 3 * GIB, GIB, StreamRequest(5 * GIB))
    assert weight_room(limited, {0: 40 * GIB, 1: None}, gpus) == 5 * GIB
    with pytest.raises(RequestError, match=r"at least 3.00 GiB.*The VRAM budget is 2.00 GiB"):
        weight_room(ModelNeeds(10 * GIB, 3 * GIB, GIB, StreamRequest(2 * GIB)), {0: None}, ("cpu",))
