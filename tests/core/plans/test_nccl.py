"""The parity cases in fresh processes: on two GPUs with NCCL, and the same code on gloo."""

from __future__ import annotations

import pytest
import torch
from comfyui_ferry.core.parallel import ParallelDims
from ferry_support.parity import CaseErrors, layouts_of, named_case_errors
from ferry_support.ranks import run_named_ranks, run_ranks
from ferry_support.tensor_parity import named_tensor_errors
from ferry_support.tiny_cases import CASES
from ferry_support.tiny_models import is_newer_comfyui

NAMES = [
    "flux1-dev full mask",
    "flux1-kontext control",
    "flux2-klein",
    "flux2 timestep zero",
    "qwen text mask, batch 2",
    "qwen edit-2511",
    "wan t2v batch 2",
    "wan ti2v",
    "wan2.1 i2v clip",
    "z-image",
    "sd3.5-medium batch 2",
    "hunyuan-1.5",
    "ltx2 frame times, batch 2",
    "sdxl",
]


def case_names() -> list[str]:
    return [name for name in NAMES if is_newer_comfyui() or not CASES[name].newer_only]


# fp32 on a GPU: other kernels for other shapes, sums in another order. bf16: a few roundings (2 ** -8 each)
# fall to the other side. Without the exchange every case is off by 0.08 or more.
LIMITS = {torch.float32: 1e-4, torch.bfloat16: 0.03}


def check(results: list[dict[str, CaseErrors]], names: list[str], limit: float) -> None:
    for rank, errors in enumerate(results):
        assert list(errors) == names
        for name, seen in errors.items():
            assert seen.parallel <= limit, (rank, name, seen)
            assert seen.rounding <= 0.05, (rank, name, seen)
            assert seen.without_exchange > 2 * limit, (rank, name, seen)


@pytest.mark.comfy
@pytest.mark.multigpu
@pytest.mark.parametrize("dims", layouts_of(2), ids=str)
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_nccl_equals_one_rank(dtype: torch.dtype, dims: ParallelDims) -> None:
    names = case_names()
    results = run_named_ranks("ferry_support.parity:named_case_errors", 2, names, dtype, dims)
    check(results, names, LIMITS[dtype])


@pytest.mark.comfy
@pytest.mark.multigpu
@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four CUDA GPUs")
@pytest.mark.parametrize("dims", layouts_of(4), ids=str)
def test_nccl_on_four_gpus_equals_one_rank(dims: ParallelDims) -> None:
    names = case_names()
    results = run_named_ranks("ferry_support.parity:named_case_errors", 4, names, torch.bfloat16, dims)
    check(results, names, LIMITS[torch.bfloat16])


@pytest.mark.comfy
@pytest.mark.multigpu
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_nccl_with_shared_weights_equals_one_rank(dtype: torch.dtype) -> None:
    names, dims = case_names(), ParallelDims(tp=2)
    results = run_named_ranks("ferry_support.tensor_parity:named_tensor_errors", 2, names, dtype, dims)
    for rank, errors in enumerate(results):
        assert list(errors) == names
        assert max(errors.values()) <= LIMITS[dtype], (rank, errors)


@pytest.mark.comfy
def test_gloo_with_shared_weights_in_bf16() -> None:
    """The code of the test above; partial sums are rounded on each rank before they are added."""
    results = run_ranks(named_tensor_errors, 2, case_names(), torch.bfloat16, ParallelDims(tp=2))
    assert max(max(errors.values()) for errors in results) <= LIMITS[torch.bfloat16], results


@pytest.mark.comfy
def test_gloo_in_fresh_interpreters_equals_one_rank() -> None:
    """The launcher and the checks of the first test, provable without GPUs; all cases run below."""
    names, dims = ["flux1-dev full mask", "wan ti2v"], ParallelDims(ulysses=2)
    results = run_named_ranks(
        "ferry_support.parity:named_case_errors", 2, names, torch.float32, dims, backend="gloo"
    )
    check(results, names, 1e-5)


@pytest.mark.comfy
def test_gloo_in_bf16() -> None:
    names = case_names()
    results = run_ranks(named_case_errors, 2, names, torch.bfloat16, ParallelDims(ring=2), timeout_s=180)
    check(results, names, LIMITS[torch.bfloat16])
