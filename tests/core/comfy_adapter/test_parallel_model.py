"""Sampling on worker processes equals sampling in this process, for whole MODELs and real samplers.

Tolerance 1e-5 relative in fp32: the same arithmetic runs, but attention over head shards and matrix
products of other shapes may add in another order (about 1e-6 is seen).
"""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch
from comfyui_ferry.core.errors import RequestError
from comfyui_ferry.core.parallel.refused_inputs import RefusedInput
from comfyui_ferry.core.plans import find_plan
from ferry_support.sampling import worker_processes

pytestmark = [pytest.mark.comfy, pytest.mark.timeout(300)]

TOLERANCE = 1e-5
FLUX = {
    "image_model": "flux", "in_channels": 16, "out_channels": 16, "vec_in_dim": 24, "context_in_dim": 40,
    "hidden_size": 48, "mlp_ratio": 4.0, "num_heads": 3, "depth": 2, "depth_single_blocks": 2,
    "axes_dim": [4, 6, 6], "theta": 10000, "patch_size": 2, "qkv_bias": True, "guidance_embed": True,
}  # fmt: skip
QWEN = {
    "image_model": "qwen_image", "patch_size": 2, "in_channels": 64, "out_channels": 16, "num_layers": 2,
    "attention_head_dim": 16, "num_attention_heads": 3, "joint_attention_dim": 40,
    "axes_dims_rope": (4, 6, 6),
}  # fmt: skip
WAN = {
    "image_model": "wan2.1", "model_type": "t2v", "dim": 48, "in_dim": 16, "out_dim": 16, "num_heads": 3,
    "ffn_dim": 72, "num_layers": 2, "patch_size": (1, 2, 2), "freq_dim": 16, "text_dim": 40,
}  # fmt: skip


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def build(family):
    """A MODEL of a tiny random model, as ComfyUI's loader would make it."""
    import comfy.model_patcher
    import comfy.supported_models as supported
    from comfy.ldm.flux.model import FluxParams

    classes = {
        "flux": (supported.Flux, FLUX),
        "qwen": (supported.QwenImage, QWEN),
        "wan": (supported.WAN21_T2V, WAN),
    }
    cls, unet_config = classes[family]
    if family == "flux" and "txt_ids_dims" in FluxParams.__annotations__:
        unet_config = {**unet_config, "txt_ids_dims": []}
    config = cls(dict(unet_config))
    config.set_inference_dtype(torch.float32, None)
    model = config.get_model({}, "")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.diffusion_model.named_parameters():
            scale = parameter[0].numel() ** -0.5 if parameter.ndim > 1 else 0.2
            center = 1.0 if parameter.ndim == 1 and name.endswith(("weight", "scale")) else 0.0
            parameter.copy_(center + scale * torch.randn(parameter.shape, generator=generator))
            parameter.requires_grad_(False)
    cpu = torch.device("cpu")
    return comfy.model_patcher.ModelPatcher(model, load_device=cpu, offload_device=cpu)


def conditioning(tokens, seed):
    return [[noise(1, tokens, 40, seed=seed), {"pooled_output": noise(1, 24, seed=seed)}]]


def latent(height=10, width=14, batch=1, frames=None):
    shape = (batch, 16, height, width) if frames is None else (batch, 16, frames, height, width)
    return {"samples": torch.zeros(shape)}


POSITIVE, NEGATIVE = conditioning(11, seed=1), conditioning(5, seed=2)


def sample_here(model, latent_image, *, cfg=3.0, positive=POSITIVE, negative=NEGATIVE, seed=5):
    import nodes

    with torch.inference_mode():
        return nodes.common_ksampler(
            model, seed, 3, cfg, "euler", "simple", positive, negative, latent_image
        )[0]["samples"]


def sample_on_workers(
    model, latent_image, degrees=(2, 1, 2), *, cfg=3.0, positive=POSITIVE, negative=NEGATIVE, seed=5
):
    from comfyui_ferry.core.comfy_adapter import sample_parallel

    with torch.inference_mode():
        return sample_parallel(
            model,
            gpus=degrees[0],
            cfg_degree=degrees[1],
            ulysses_degree=degrees[2],
            seed=seed,
            steps=3,
            cfg=cfg,
            sampler_name="euler",
            scheduler="simple",
            positive=positive,
            negative=negative,
            latent=latent_image,
            denoise=1.0,
        )["samples"]


def difference(a, b):
    return ((a - b).abs().max() / b.abs().max()).item()


def make_lora(model, seed=0):
    """A LoRA on every Linear of the first block, under the names that stock nodes write."""
    state = {}
    for name, weight in model.model.diffusion_model.state_dict().items():
        if ".0." in name and name.endswith(".weight") and weight.ndim == 2:
            base = f"diffusion_model.{name.removesuffix('.weight')}"
            state[f"{base}.lora_up.weight"] = 0.1 * noise(weight.shape[0], 4, seed=seed)
            state[f"{base}.lora_down.weight"] = 0.1 * noise(4, weight.shape[1], seed=seed + 1)
            state[f"{base}.alpha"] = torch.tensor(2.0)
    assert state
    return state


def with_lora(model, strength, seed=0):
    import comfy.sd

    return comfy.sd.load_lora_for_models(model, None, make_lora(model, seed), strength, 0)[0]


def fingerprint(model):
    """The exact bytes of every weight, and what is attached to the diffusion model."""
    diffusion_model = model.model.diffusion_model
    weights = {name: value.clone() for name, value in diffusion_model.state_dict().items()}
    return weights, sorted(diffusion_model.__dict__)


@pytest.fixture(scope="module", autouse=True)
def close_at_the_end():
    yield
    from comfyui_ferry.core.comfy_adapter import close_workers

    close_workers()
    assert worker_processes() == []


def test_two_ranks_give_the_same_picture_for_every_family_size_and_lora():
    """One warm pair of workers: other models, sizes, batches, prompts and LoRAs, twice each."""
    started = set()
    for family in ("flux", "qwen", "wan"):
        model = build(family)
        before = fingerprint(model)
        shapes = [latent(10, 14), latent(13, 10, batch=2)]
        if family == "wan":
            shapes.append(latent(6, 10, frames=3))
        for latent_image in shapes:
            expected = sample_here(model, latent_image)
            assert difference(sample_on_workers(model, latent_image), expected) <= TOLERANCE, family
        for strength, seed in ((1.0, 0), (0.5, 0), (0.5, 7)):
            patched = with_lora(model, strength, seed)
            expected_patched = sample_here(patched, shapes[0])
            assert difference(expected_patched, sample_here(model, shapes[0])) > 1e-3
            assert difference(sample_on_workers(patched, shapes[0]), expected_patched) <= TOLERANCE, family
        assert difference(sample_on_workers(model, shapes[0]), sample_here(model, shapes[0])) <= TOLERANCE
        weights, attached = fingerprint(model)
        assert attached == before[1]
        assert all(torch.equal(weights[name], before[0][name]) for name in weights)
        started.add(tuple(worker_processes()))
    assert len(started) == 1 and len(worker_processes()) == 2  # another model starts no process


def test_a_changed_lora_prompt_or_size_does_not_reload_the_model(monkeypatch):
    from comfyui_ferry.core.workers import WorkerPool

    jobs = []
    submit = WorkerPool.submit
    monkeypatch.setattr(
        WorkerPool, "submit", lambda self, job, *a, **k: jobs.append(job) or submit(self, job, *a, **k)
    )
    model = build("wan")
    for strength in (1.0, 0.3):
        sample_on_workers(with_lora(model, strength), latent())
    sample_on_workers(model, latent(8, 8))
    assert jobs.count("patch") == 3
    sample_on_workers(model, latent(12, 6, batch=2), positive=conditioning(7, seed=8), cfg=1.0)
    assert (jobs.count("load"), jobs.count("patch")) == (1, 3)


def test_a_collected_clone_does_not_switch_the_workers_off():
    from comfyui_ferry.core.comfy_adapter import make_parallel

    model = build("wan")
    parallel = make_parallel(model, gpus=2, cfg_degree=1, ulysses_degree=2)
    sample_here(parallel, latent())
    injected = model.model.diffusion_model.__dict__["_forward"]
    clone = parallel.clone()
    del clone
    gc.collect()
    assert model.model.diffusion_model.__dict__["_forward"] is injected
    assert difference(sample_here(parallel, latent()), sample_here(model, latent())) <= TOLERANCE
    assert "_forward" not in model.model.diffusion_model.__dict__
    assert difference(sample_here(parallel, latent()), sample_here(model, latent())) <= TOLERANCE


def test_regional_prompts_and_masks():
    """Several entries per conditioning, with areas and strengths, stay ComfyUI's business."""
    model = build("flux")
    area = [
        [
            noise(1, 9, 40, seed=8),
            {"pooled_output": noise(1, 24, seed=8), "area": (6, 6, 2, 4), "strength": 0.7},
        ]
    ]
    positive = POSITIVE + area
    image = {**latent(), "noise_mask": (noise(1, 1, 10, 14) > 0).float()}
    expected = sample_here(model, image, positive=positive)
    assert difference(sample_on_workers(model, image, (2, 1, 2), positive=positive), expected) <= TOLERANCE
    assert difference(sample_on_workers(model, image, (2, 2, 1), positive=positive), expected) <= TOLERANCE


def test_other_samplers_take_a_parallel_model():
    """KSamplerAdvanced's slices, SamplerCustomAdvanced's guider and its previews, through Parallel Model."""
    import comfy.samplers
    from comfyui_ferry.core.comfy_adapter import make_parallel

    import nodes

    model = build("wan")
    parallel = make_parallel(model, gpus=2, cfg_degree=2, ulysses_degree=1)
    results = []
    for candidate in (model, parallel):
        with torch.inference_mode():
            settings = (candidate, 3, 6, 3.0, "dpmpp_2m", "karras", POSITIVE, NEGATIVE)
            first = nodes.common_ksampler(*settings, latent(), start_step=0, last_step=3)[0]
            second = nodes.common_ksampler(*settings, first, disable_noise=True, start_step=3)[0]["samples"]
            guider = comfy.samplers.CFGGuider(candidate)
            guider.set_conds(POSITIVE, NEGATIVE)
            guider.set_cfg(2.5)
            sampler = comfy.samplers.sampler_object("euler_ancestral")
            sigmas = torch.tensor([1.0, 0.6, 0.2, 0.0])
            previews = []
            custom = guider.sample(
                noise(1, 16, 1, 8, 8),
                torch.zeros(1, 16, 1, 8, 8),
                sampler,
                sigmas,
                seed=4,
                callback=lambda step, denoised, x, total, previews=previews: previews.append(denoised),
            )
        assert len(previews) == 3
        results.append((second, custom, *previews))
    for here, there in zip(*results, strict=True):
        assert difference(there, here) <= TOLERANCE


def test_cancel_leaves_the_workers_usable(monkeypatch):
    import comfy.model_management as management

    model = build("wan")
    expected = sample_here(model, latent())
    assert difference(sample_on_workers(model, latent(), (2, 2, 1)), expected) <= TOLERANCE
    workers = worker_processes()
    management.interrupt_current_processing(True)
    with pytest.raises(management.InterruptProcessingException):
        sample_on_workers(model, latent(), (2, 2, 1))
    management.interrupt_current_processing(False)
    assert difference(sample_on_workers(model, latent(), (2, 2, 1)), expected) <= TOLERANCE
    assert worker_processes() == workers


@pytest.mark.parametrize("degrees", [(1, 1, 1), (2, 2, 1), (3, 1, 3), (4, 2, 2), (3, 3, 1)], ids=str)
def test_degrees(degrees):
    """CFG parallel with prompts of lengths that ComfyUI cannot batch, uneven heads, and their product."""
    model = build("qwen")
    for positive, negative in ((POSITIVE, NEGATIVE), (conditioning(8, 3), conditioning(8, 4))):
        prompts = {"positive": positive, "negative": negative}
        expected = sample_here(model, latent(), **prompts)
        assert difference(sample_on_workers(model, latent(), degrees, **prompts), expected) <= TOLERANCE
    expected = sample_here(model, latent(), cfg=1.0)
    assert difference(sample_on_workers(model, latent(), degrees, cfg=1.0), expected) <= TOLERANCE
    assert len(worker_processes()) == degrees[0]


@pytest.fixture
def refused(monkeypatch):
    """Assert that a request is refused, with a message, before any worker is started."""
    from comfyui_ferry.core.comfy_adapter import close_workers
    from comfyui_ferry.core.workers import WorkerPool

    close_workers()
    monkeypatch.setattr(WorkerPool, "start", lambda *a, **k: pytest.fail("a worker was started"))

    def check(match, model=None, degrees=(2, 1, 2), **changes):
        with pytest.raises(RequestError, match=match):
            sample_on_workers(
                model or build("wan"), changes.pop("latent_image", latent()), degrees, **changes
            )
        assert worker_processes() == []

    return check


@pytest.mark.parametrize(
    ("degrees", "match"),
    [
        ((0, 1, 1), r"gpus=0 .* from 1 to"),
        ((-1, 1, 1), r"gpus=-1 .* from 1 to"),
        ((999, 1, 999), r"gpus=999 .* from 1 to"),
        ((3, 2, 2), r"3 GPUs.*= 4.*must equal.*gpus to 4"),
        ((2, 0, 2), r"cfg_degree=0"),
        ((4, 1, 4), r"ulysses.*4.*3"),
    ],
)
def test_degrees_that_do_not_fit_are_refused(refused, degrees, match):
    refused(match, degrees=degrees)


def test_bad_latents_and_conditionings_are_refused(refused):
    bad = latent()
    bad["samples"][0, 0, 0, 0] = float("nan")
    refused(r"latent \(1, 16, 10, 14\) has 1 NaN", latent_image=bad)
    refused("conditioning 'positive' is empty", positive=[])


def test_an_input_that_only_a_whole_sequence_can_take_is_refused(refused, monkeypatch):
    from comfyui_ferry.core.comfy_adapter import parallel_model

    plan = replace(
        find_plan("comfy.ldm.wan.model.WanModel"), refused=(RefusedInput("ref_latent", "Only whole"),)
    )
    monkeypatch.setattr(parallel_model, "find_plan", lambda path: plan)
    given = [[tokens, options | {"ref_latent": noise(1, 4)}] for tokens, options in conditioning(11, 1)]
    refused("ref_latent was given to Wan.*Only whole.*Set ulysses_degree", negative=given)


def test_a_model_without_a_plan_is_refused(refused):
    model = build("wan")

    class Unknown(type(model.model.diffusion_model)):
        pass

    model.model.diffusion_model.__class__ = Unknown
    refused(r"Unknown was asked.*qwen_image.*stock KSampler", model=model)


def test_what_workers_cannot_honour_is_refused_by_name(refused):
    import comfy.patcher_extension

    patched = build("flux").clone()
    patched.set_model_patch_replace(lambda *a: None, "dit", "double_block", 0)
    refused("patches_replace", model=patched)

    patched = build("flux").clone()
    patched.set_model_attn1_patch(lambda *a: None)
    refused("patches .*attn1_patch", model=patched)

    injected = build("flux").clone()
    injected.set_injections(
        "theirs", [comfy.patcher_extension.PatcherInjection(lambda p: None, lambda p: None)]
    )
    refused(r"injections: theirs", model=injected)

    replaced = build("flux").clone()
    replaced.add_object_patch("diffusion_model.final_layer", torch.nn.Identity())
    refused("object patches.*final_layer", model=replaced)

    merged = build("wan").clone()
    merged.add_patches(merged.get_key_patches("diffusion_model."), 0.5, 0.5)
    refused("weight patch of.*save the merge", model=merged)


def test_a_parallel_model_is_not_made_parallel_again(refused):
    from comfyui_ferry.core.comfy_adapter import make_parallel

    refused("parallel already", model=make_parallel(build("wan"), gpus=2, cfg_degree=1, ulysses_degree=2))
