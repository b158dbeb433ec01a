"""ComfyUI's memory manager sees the workers' copies, and they go when nobody needs them."""

from __future__ import annotations

import gc
import time

import pytest
import torch
from comfyui_ferry.core.comfy_adapter.worker_groups import loaded_bytes, model_token
from ferry_support.sampling import CFG_2, TOLERANCE, difference, parallel, sample, with_lora
from ferry_support.tiny_patchers import PATCHERS

pytestmark = [pytest.mark.comfy, pytest.mark.timeout(120)]

KIND = "wan"


@pytest.fixture
def model():
    return PATCHERS[KIND].build()


def entries():
    import comfy.model_management as management

    return [type(loaded.model).__name__ for loaded in management.current_loaded_models]


def weight_bytes(model):
    return sum(parameter.nbytes for parameter in model.model.diffusion_model.parameters())


@pytest.mark.parametrize("keeps_patcher", [True, False], ids=["parallel model", "parallel sampler"])
def test_unload_all_models_frees_the_workers(model, keeps_patcher):
    """Also after the parallel MODEL is gone (Parallel Sampler), and after a stock sampling of the base."""
    import comfy.model_management as management

    token = model_token(model.model)
    kept = parallel(model, CFG_2)
    expected = sample(model, KIND)
    for sampled_stock_last in (False, True):
        assert difference(sample(kept, KIND), expected) <= TOLERANCE
        if not keeps_patcher:
            kept = None
            gc.collect()
        assert loaded_bytes(token) >= weight_bytes(model)
        assert "WorkerMemory" in entries()
        if sampled_stock_last:
            assert torch.equal(sample(model, KIND), expected)
        management.unload_all_models()
        assert loaded_bytes(token) == 0
        kept = kept or parallel(model, CFG_2)
    assert difference(sample(kept, KIND), expected) <= TOLERANCE


def test_a_collected_model_leaves_the_workers_without_another_sampling():
    token = None

    def use():
        nonlocal token
        model = PATCHERS[KIND].build()
        token = model_token(model.model)
        sample(parallel(model, CFG_2), KIND)
        assert loaded_bytes(token) > 0

    use()
    gc.collect()
    until = time.monotonic() + 10
    while loaded_bytes(token) and time.monotonic() < until:
        time.sleep(0.01)
    assert loaded_bytes(token) == 0
    assert "WorkerMemory" not in entries()


def test_stock_sampling_between_parallel_ones(model):
    """The stock path patches the LoRA into the weights in place; the workers get pristine ones."""
    patched = with_lora(model)
    expected, plain = sample(patched, KIND), sample(model, KIND)
    assert difference(expected, plain) > 1e-3
    kept = parallel(patched, CFG_2)
    for _ in range(2):
        assert difference(sample(kept, KIND), expected) <= TOLERANCE
        assert difference(sample(parallel(model, CFG_2), KIND), plain) <= TOLERANCE
        assert torch.equal(sample(patched, KIND), expected)
        assert torch.equal(sample(model, KIND), plain)
    assert "_forward" not in model.model.diffusion_model.__dict__


def test_a_lora_behind_the_parallel_node(model):
    expected = sample(with_lora(model), KIND)
    kept = parallel(model, CFG_2)
    plain = sample(kept, KIND)
    assert difference(sample(with_lora(kept), KIND), expected) <= TOLERANCE
    assert torch.equal(sample(kept, KIND), plain)


def test_two_models_in_turn():
    models = {kind: PATCHERS[kind].build() for kind in ("wan", "qwen")}
    expected = {kind: sample(model, kind) for kind, model in models.items()}
    for _ in range(2):
        for kind, model in models.items():
            assert difference(sample(parallel(model, CFG_2), kind), expected[kind]) <= TOLERANCE
    assert all(loaded_bytes(model_token(model.model)) for model in models.values())


def test_cancel_while_the_workers_start(model):
    import threading

    import comfy.model_management as management
    from ferry_support.forked_workers import starting_afresh
    from ferry_support.sampling import worker_processes

    expected = sample(model, KIND)
    with starting_afresh():  # which takes seconds
        timer = threading.Timer(0.5, management.interrupt_current_processing, [True])
        timer.start()
        with pytest.raises(management.InterruptProcessingException):
            sample(parallel(model, CFG_2), KIND)
        timer.join()
    assert worker_processes() == []
    assert difference(sample(parallel(model, CFG_2), KIND), expected) <= TOLERANCE
