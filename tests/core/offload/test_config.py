from __future__ import annotations

import pytest
import torch
from comfyui_ferry.core.errors import RequestError
from comfyui_ferry.core.offload import OffloadTrainingManager
from comfyui_ferry.core.offload.config import OffloadConfig
from torch import nn


def request(device="cpu", **sizes):
    return OffloadConfig.from_request(
        device, False, split_threshold_mb=sizes.get("split"), recompute_cache_mb=sizes.get("cache")
    )


def test_sizes_are_in_mb_of_bytes():
    config = request(split=1.5, cache=2)
    assert config.split_threshold_bytes == 3 * 2**19
    assert config.recompute_cache_bytes == 2**21
    assert request().split_threshold_bytes is None


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), "64", True])
def test_a_threshold_out_of_range_is_refused(value):
    with pytest.raises(RequestError, match=f"cpu_offload_split_threshold={value!r}"):
        request(split=value)


def test_a_cache_of_zero_is_allowed_and_below_is_not():
    assert request(cache=0).recompute_cache_bytes == 0
    with pytest.raises(RequestError, match="recompute_cache_mb=-1"):
        request(cache=-1)


@pytest.mark.parametrize("device", ["mps", "meta", "warp:9", 3.5, None])
def test_other_devices_are_refused(device):
    with pytest.raises(RequestError, match="target_device"):
        request(device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_without_a_gpu_is_refused():
    with pytest.raises(RequestError, match=r"sees 0 CUDA device"):
        request("cuda")


def test_the_seeds_positional_arguments_work():
    with OffloadTrainingManager(nn.Linear(2, 2), torch.device("cpu"), True, 100) as manager:
        assert manager.stats().streamed_bytes == 4 * (4 + 2)
