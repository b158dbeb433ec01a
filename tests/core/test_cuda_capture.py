"""Recordings on a made-up CUDA: what an error in the call leaves behind."""

from __future__ import annotations

import contextlib

import pytest
import torch
from comfyui_ferry.core.cuda_capture import CudaCapture


class Graph:
    """As torch's: ending a recording that something forbidden broke is an error too."""

    def capture_begin(self, *, pool, capture_error_mode):
        assert capture_error_mode == "thread_local"
        begun.append(pool)

    def capture_end(self):
        if broken:
            raise RuntimeError("use_count > 0 INTERNAL ASSERT FAILED")

    def replay(self):
        pass


broken: list[bool] = []
begun: list[int] = []


@pytest.fixture(autouse=True)
def cuda(monkeypatch):
    streams, pools = ["default"], iter(range(9))

    @contextlib.contextmanager
    def stream(which):
        streams.append(which)
        try:
            yield
        finally:
            streams.pop()

    made = {"graph_pool_handle": lambda: next(pools), "Stream": object, "CUDAGraph": Graph, "stream": stream}
    for name, value in (made | {"synchronize": lambda: None, "empty_cache": lambda: None}).items():
        monkeypatch.setattr(torch.cuda, name, value)
    broken.clear()
    begun.clear()
    return streams


def test_an_error_in_the_call_is_the_one_that_is_raised_and_ends_the_recording(cuda):
    capture = CudaCapture()
    assert [capture(lambda: len(cuda))[1] for _ in range(2)] == [2, 2]  # on a stream of its own

    def failing():
        broken.append(True)
        raise ValueError("mat2 must be divisible by 16")

    with pytest.raises(ValueError, match="divisible by 16"):
        capture(failing)
    assert cuda == ["default"]
    broken.clear()
    assert capture(lambda: "again")[1] == "again"
    assert begun == [0, 0, 0, 1]  # the spoilt pool is not used again
