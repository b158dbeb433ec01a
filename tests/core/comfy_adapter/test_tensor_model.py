"""Whole samplings with the weights shared by two workers equal sampling in this process.

Tolerance 1e-5 relative in fp32: partial sums of the ranks are added in another order (about 1e-6 is seen).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from comfyui_ferry.core.errors import RequestError
from comfyui_ferry.core.parallel import RankLayout
from ferry_support.parity import world_group
from ferry_support.quantized_patchers import quantized_patcher
from ferry_support.ranks import run_ranks
from ferry_support.sampling import TOLERANCE, difference, parallel, sample, with_lora, worker_processes
from ferry_support.tensor_parity import weight_bytes
from ferry_support.tiny_models import is_newer_comfyui
from ferry_support.tiny_patchers import PATCHERS

pytestmark = [pytest.mark.comfy, pytest.mark.timeout(300), pytest.mark.usefixtures("workers_of_the_file")]

TENSOR_2 = {"gpus": 2, "cfg_degree": 1, "ulysses_degree": 1, "tensor_parallel_degree": 2}


def test_samplings_equal_one_process_and_lora_changes_reload_nothing() -> None:
    from comfyui_ferry.core.comfy_adapter.worker_groups import loaded_bytes, model_token

    flux, qwen, wan = (PATCHERS[kind].build() for kind in ("flux", "qwen", "wan"))
    check("flux", flux)
    workers = worker_processes()
    # On attention, feed-forward and modulation layers of the first block.
    check("flux", with_lora(flux, 0.5))
    check("flux", with_lora(flux))
    check("flux", flux)
    check("qwen", qwen)
    check("wan", with_lora(wan))
    if is_newer_comfyui():
        quantized = quantized_patcher("flux")
        before = sample(quantized, "flux", steps=1)
        check("flux", with_lora(quantized))
        # Its own weights now lie in the workers' memory, and are as they were.
        assert torch.equal(sample(quantized, "flux", steps=1), before)
    assert worker_processes() == workers
    assert 0 < loaded_bytes(model_token(qwen.model)) <= 0.55 * weight_bytes(qwen.model.diffusion_model)


def check(kind: str, model: Any) -> None:
    expected = sample(model, kind, steps=1)
    assert difference(sample(parallel(model, TENSOR_2), kind, steps=1), expected) <= TOLERANCE


def test_memory_of_a_worker_counts_its_part_only() -> None:
    """ComfyUI's memory manager sees the part that the fullest worker holds."""
    model = PATCHERS["qwen"].build()
    entries = [
        parallel(model, degrees).get_nested_additional_models()[-1]
        for degrees in (TENSOR_2, {"gpus": 2, "cfg_degree": 2, "ulysses_degree": 1})
    ]
    assert entries[0] is entries[1]
    whole = entries[1].model_size()
    assert whole == weight_bytes(model.model.diffusion_model)
    assert parallel(model, TENSOR_2).get_nested_additional_models()[-1].model_size() <= 0.55 * whole


def _worker(description: dict, weights: dict, message: dict, layout: RankLayout) -> dict[str, Any]:
    from comfyui_ferry.core.comfy_adapter.worker_model import WorkerModel

    with torch.inference_mode():
        worker = WorkerModel(description, weights, device=torch.device("cpu"), layout=layout)
        held = weight_bytes(worker.module)
        plain = {name: tensor.clone() for name, tensor in worker.module.state_dict().items()}
        names = worker.apply_patches(message)
        patched = {name: tensor.clone() for name, tensor in worker.module.state_dict().items()}
        # What was patched must not keep the whole weight alive.
        storages = {
            name: tensor.untyped_storage().nbytes() for name, tensor in worker.module.state_dict().items()
        }
        worker.apply_patches({})
        restored = all(
            torch.equal(plain[name], tensor) for name, tensor in worker.module.state_dict().items()
        )
    return {
        "held": held, "names": names, "patched": patched, "restored": restored, "storages": storages,
        "shards": worker.held.shards,
    }  # fmt: skip


def test_a_lora_is_added_to_the_whole_weight_and_cut_bit_for_bit() -> None:
    """In bf16, where ComfyUI rounds stochastically: each rank has the numbers of the whole weight."""
    from comfyui_ferry.core.comfy_adapter.model_export import describe_model, named_tensors
    from comfyui_ferry.core.comfy_adapter.patch_messages import encode_patches

    model = with_lora(PATCHERS["qwen"].build(dtype=torch.bfloat16))
    description = describe_model(model.model)
    weights = {name: tensor.detach() for name, tensor in named_tensors(model.model.diffusion_model).items()}
    message = encode_patches(model.patches)

    whole = _worker(description, weights, message, RankLayout(0, None))

    def rank() -> None:
        part = _worker(description, weights, message, RankLayout(0, None, world_group()))
        assert part["held"] <= 0.55 * whole["held"]
        assert part["names"] == whole["names"] != []
        assert part["restored"]
        shards = part["shards"]
        for name, tensor in whole["patched"].items():
            expected = shards.take(name, tensor)
            if expected is None:
                assert name not in part["patched"]
                continue
            assert torch.equal(part["patched"][name], expected), name
            if name in part["names"]:
                assert part["storages"][name] == expected.numel() * expected.element_size(), name

    run_ranks(rank, 2)


def test_degrees_that_do_not_fit_are_refused_before_any_process_starts() -> None:
    model = PATCHERS["flux"].build()  # three heads
    before = worker_processes()
    with pytest.raises(RequestError, match=r"tensor_parallel_degree=4 was asked for Flux.* has 3\."):
        parallel(model, {"gpus": 4, "cfg_degree": 1, "ulysses_degree": 1, "tensor_parallel_degree": 4})
    with pytest.raises(RequestError, match=r"ulysses_degree=2 .* has 3, or 1 with tensor_parallel_degree=2"):
        parallel(model, {"gpus": 4, "cfg_degree": 1, "ulysses_degree": 2, "tensor_parallel_degree": 2})
    with pytest.raises(RequestError, match=r"tensor_parallel_degree='2' was asked"):
        parallel(model, TENSOR_2 | {"tensor_parallel_degree": "2"})
    with pytest.raises(RequestError, match=r"cfg 1 x batch 1 x tp 3 x ring 1 x ulysses 1 = 3"):
        parallel(model, TENSOR_2 | {"tensor_parallel_degree": 3})
    assert worker_processes() == before
