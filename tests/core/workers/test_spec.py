from __future__ import annotations

import sys

import pytest
import torch
from comfyui_ferry.core.errors import RequestError
from comfyui_ferry.core.workers import Deadlines
from comfyui_ferry.core.workers.spec import visible_device
from ferry_support.worker_specs import cpu_spec

GPU = "GPU-01234567-89ab-cdef-0123-456789abcdef"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"devices": ()}, "0 workers"),
        ({"backend": "mpi"}, "backend='mpi'.*gloo, nccl"),
        ({"devices": ("cpu", 0)}, "cannot be mixed"),
        ({"backend": "nccl"}, "NCCL needs a different GPU"),
        ({"devices": (GPU, GPU), "backend": "nccl"}, "NCCL needs a different GPU"),
        ({"setup": "core.workers.nothing"}, "core.workers.nothing.*no such module"),
        ({"setup": "../../etc/passwd"}, "no such module"),
        ({"setup": "ferry_support.nothing"}, "no such module"),
        ({"environment": {"CUDA_VISIBLE_DEVICES": "1"}}, "CUDA_VISIBLE_DEVICES"),
        ({"num_threads": 0}, "num_threads=0"),
    ],
)
def test_what_cannot_be_is_refused(changes, message):
    with pytest.raises(RequestError, match=message):
        cpu_spec(2, **changes)


@pytest.mark.parametrize("value", [0, -1, float("inf"), float("nan")])
def test_a_deadline_is_finite_and_positive(value):
    with pytest.raises(RequestError, match=f"call_s={value} was asked"):
        Deadlines(call_s=value)


def test_an_unknown_executable_is_refused(monkeypatch):
    monkeypatch.setattr(sys, "executable", "")
    with pytest.raises(RequestError, match="executable"):
        cpu_spec()


def test_setup_lies_in_the_pack_unless_a_root_is_named():
    assert cpu_spec(setup="core.workers.spec").setup_module == "comfyui_ferry.core.workers.spec"
    assert cpu_spec().setup_module == "ferry_support.worker_jobs"


def test_cores_are_divided_evenly(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(16)))
    assert cpu_spec(3, num_threads=None).threads_per_rank() == 5
    assert cpu_spec(32, num_threads=None).threads_per_rank() == 1
    assert cpu_spec(3, num_threads=2).threads_per_rank() == 2


def test_a_gpu_is_named_to_the_worker_by_its_uuid(monkeypatch):
    class Properties:
        uuid = GPU.removeprefix("GPU-")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties)
    assert visible_device(1) == GPU
    assert visible_device(GPU) == GPU
    assert visible_device("cpu") == ""
    for missing in (2, -1, "cuda:0", "0,1"):
        with pytest.raises(RequestError, match="torch sees 2 GPUs"):
            visible_device(missing)
