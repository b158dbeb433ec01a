"""Weights that are patched while their block runs: the same numbers, and none held besides."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from comfyui_ferry.core.parallel import RankLayout
from ferry_support.sampling import with_lora
from ferry_support.tiny_models import noise, qwen_call
from ferry_support.tiny_patchers import PATCHERS

pytestmark = [pytest.mark.comfy, pytest.mark.timeout(120)]


def outputs(patcher: Any, patches: list[Any], held: int, monkeypatch: Any) -> tuple[list[torch.Tensor], Any]:
    """What a worker gives with each of these MODELs' patches in turn; and the worker."""
    from comfyui_ferry.core.comfy_adapter import patched_blocks
    from comfyui_ferry.core.comfy_adapter.model_export import describe_model, named_tensors
    from comfyui_ferry.core.comfy_adapter.patch_messages import encode_patches
    from comfyui_ferry.core.comfy_adapter.worker_model import WorkerModel

    monkeypatch.setattr(patched_blocks, "MOST_HELD_BYTES", held)
    weights = {
        name: each.detach().clone() for name, each in named_tensors(patcher.model.diffusion_model).items()
    }
    layout = RankLayout(0, None)
    worker = WorkerModel(describe_model(patcher.model), weights, device=torch.device("cpu"), layout=layout)
    seen = []
    for each in patches:
        worker.apply_patches(encode_patches(each.patches))
        call = qwen_call(x=noise(1, 16, 1, 10, 14), transformer_options={})
        seen.append(worker.forward(call))
    return seen, worker


def test_they_give_the_same_numbers_and_leave_the_shared_weights_in_place(monkeypatch):
    model = PATCHERS["qwen"].build()
    turns = [model, with_lora(model, everywhere=True), with_lora(model, 0.5), model]
    expected, _ = outputs(model, turns, 1 << 40, monkeypatch)
    actual, worker = outputs(model, turns[:-1], 0, monkeypatch)
    assert not torch.equal(expected[0], expected[1])
    assert all(torch.equal(one, other) for one, other in zip(actual, expected[:-1], strict=True))
    held = {name: each.data_ptr() for name, each in worker.module.named_parameters()}
    assert held == {name: worker.weights[name].data_ptr() for name in held}
    worker.apply_patches({})
    call = qwen_call(x=noise(1, 16, 1, 10, 14), transformer_options={})
    assert torch.equal(worker.forward(call), expected[-1])
