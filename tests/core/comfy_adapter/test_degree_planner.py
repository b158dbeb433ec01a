"""Degrees proposed for tiny MODELs, and that the proposal runs and leaves nothing behind."""

from __future__ import annotations

from dataclasses import replace

import pytest
from comfyui_ferry.core.errors import RequestError
from comfyui_ferry.core.parallel.refused_inputs import RefusedInput
from ferry_support.quantized_patchers import quantized_patcher
from ferry_support.sampling import TOLERANCE, difference, parallel, prompts, sample
from ferry_support.tiny_models import is_newer_comfyui
from ferry_support.tiny_patchers import PATCHERS

pytestmark = pytest.mark.comfy


@pytest.fixture
def machine(monkeypatch):
    """Four GPUs with links so fast that all are worth using, on which tiny models take long."""
    from comfyui_ferry.core.comfy_adapter import degree_planner
    from comfyui_ferry.core.parallel import Machine

    described = Machine(4, 2**30, 1e6, 1e6, 1e15, collective_s=0.0, launch_s=0.0, dispatch_s=0.0)
    monkeypatch.setattr(degree_planner, "describe_machine", lambda gpus: replace(described, gpus=gpus))


def plan(kind, *, max_gpus=4, cfg=3.0, model=None):
    from comfyui_ferry.core.comfy_adapter import plan_degrees

    with_prompts = prompts(kind)
    return plan_degrees(
        model or PATCHERS[kind].build(),
        latent=PATCHERS[kind].latent(),
        cfg=cfg,
        max_gpus=max_gpus,
        **with_prompts,
    )


def test_the_proposal_runs_and_gives_the_same_picture(machine):
    kind = "qwen"
    model = PATCHERS[kind].build()
    alone = sample(model, kind)
    advice = plan(kind, max_gpus=2, model=model)
    assert advice.dims.cfg == 2 and advice.gpus == 2
    assert "2 of 2 GPUs, cfg 2" in advice.text
    degrees = {"gpus": 2, "cfg_degree": 2, "ulysses_degree": 1}
    assert difference(sample(parallel(model, degrees), kind), alone) < TOLERANCE
    assert difference(sample(model, kind), alone) == 0  # the model itself still works, untouched


@pytest.mark.parametrize(("form", "cut"), [("int8_tensorwise", True), ("mxfp8", False)])
def test_quantized_weights_are_counted_as_they_are(machine, form, cut):
    """And are proposed to be cut only where they can be."""
    if not is_newer_comfyui():
        pytest.skip("0.3.75 holds quantized weights in another way")
    plain, quantized = (
        plan("flux", max_gpus=2),
        plan("flux", max_gpus=2, model=quantized_patcher("flux", form)),
    )
    assert quantized.dims == plain.dims
    assert ("tp 2" in quantized.text) is cut


def test_without_guidance_there_is_one_conditioning(machine, monkeypatch):
    """And where an input needs the whole sequence on each GPU, no sequence is shared."""
    from comfyui_ferry.core.comfy_adapter import degree_planner

    advice = plan("qwen", cfg=1.0)
    assert advice.dims.cfg == 1
    assert advice.gpus == 4 or advice.gpus == 3  # three heads: a fourth rank has none
    assert advice.dims.sequence_size > 1
    found = degree_planner.find_plan("comfy.ldm.qwen_image.model.QwenImageTransformer2DModel")
    refusing = replace(found, refused=(RefusedInput("pooled_output", "Only whole"),))
    monkeypatch.setattr(degree_planner, "find_plan", lambda path: refusing)
    model, given = PATCHERS["qwen"].build(), prompts("qwen")
    negative = [[tokens, options | {"pooled_output": tokens[:, 0]}] for tokens, options in given["negative"]]
    latent = PATCHERS["qwen"].latent()
    advice = degree_planner.plan_degrees(
        model, positive=given["positive"], negative=negative, latent=latent, cfg=1.0, max_gpus=4
    )
    assert advice.dims.sequence_size == 1 and advice.dims.tp > 1


def test_no_worker_starts_and_nothing_stays_on_the_model(machine):
    import psutil

    model = PATCHERS["flux"].build()
    before = set(vars(model.model.diffusion_model))
    children = len(psutil.Process().children())
    plan("flux", model=model)
    assert set(vars(model.model.diffusion_model)) == before
    assert len(psutil.Process().children()) == children
    assert not model.injections and not model.attachments


def test_a_patched_model_is_refused_by_name(machine):
    model = PATCHERS["flux"].build()
    model.set_model_patch(lambda *args: None, "attn1_patch")
    with pytest.raises(RequestError, match="attn1_patch"):
        plan("flux", model=model)


def test_this_machine_is_described():
    from comfyui_ferry.core.comfy_adapter.gpu_speed import describe_machine

    machine = describe_machine(2)
    assert machine.gpus == 2
    assert 1e8 < machine.linear_flops_per_s < 1e17 and 1e8 < machine.attention_flops_per_s < 1e17
    assert machine.memory_bytes > 2**20


def test_measured_links_count_before_the_name_of_the_board(monkeypatch):
    from comfyui_ferry.core.comfy_adapter import gpu_speed

    pairs = [{"bytes_per_s": 40e9}, {"bytes_per_s": 18e9}]
    monkeypatch.setattr(gpu_speed, "known_links", lambda devices: {"links": pairs})
    assert gpu_speed._link_bytes_per_s(("GPU-a", "GPU-b")) == 18e9
    monkeypatch.setattr(gpu_speed, "known_links", lambda devices: None)
    monkeypatch.setattr("torch.cuda.can_device_access_peer", lambda one, other: False)
    assert gpu_speed._link_bytes_per_s(("GPU-a", "GPU-b")) == 7e9
