"""Everything that reaches the model's ``_forward`` reaches the workers, or is refused by name."""

from __future__ import annotations

import inspect

import pytest
import torch
from comfyui_ferry.core.errors import RequestError
from ferry_support.sampling import (
    TOLERANCE,
    ULYSSES_2,
    difference,
    parallel,
    prompts,
    sample,
    with_lora,
)
from ferry_support.tiny_models import noise
from ferry_support.tiny_patchers import PATCHERS

pytestmark = [pytest.mark.comfy, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def models():
    return {kind: PATCHERS[kind].build() for kind in ("flux", "qwen", "wan")}


def assert_equal(model, kind, **settings):
    """Both paths give one latent; returns it."""
    here = sample(model, kind, **settings)
    assert difference(sample(parallel(model, ULYSSES_2), kind, **settings), here) <= TOLERANCE
    return here


def test_context_windows(models):
    import comfy_extras.nodes_context_windows as windows

    latent = {"samples": torch.zeros(1, 16, 6, 8, 6)}
    node = windows.WanContextWindowsManualNode
    settings = {
        "context_length": 9, "context_overlap": 4, "context_schedule": "standard_static", "context_stride": 1,
        "closed_loop": False, "fuse_method": "pyramid", "freenoise": False,
    }  # fmt: skip
    known = inspect.signature(node.execute).parameters
    settings = {name: value for name, value in settings.items() if name in known}
    windowed = node.execute(models["wan"], **settings).args[0]
    plain = sample(models["wan"], "wan", latent=latent)
    assert difference(assert_equal(windowed, "wan", latent=latent), plain) > 1e-3


@pytest.mark.parametrize("kind", ["flux", "qwen"])
def test_reference_latents(models, kind):
    shapes = [(8, 6), (5, 5)]
    references = [noise(*PATCHERS[kind].latent()["samples"].shape[:-2], *shape) for shape in shapes]
    plain = sample(models[kind], kind)
    for method in ("index", "offset", "uxo"):
        options = {"reference_latents": references, "reference_latents_method": method}
        conditioning = prompts(kind, positive=options)
        assert difference(assert_equal(models[kind], kind, conditioning=conditioning), plain) > 1e-3


@pytest.mark.parametrize("kind", ["flux", "qwen"])
@pytest.mark.parametrize("tokens", [12, 7])
def test_controlnet_residuals(models, kind, tokens):
    """For all image tokens, or for the first ones only; one tensor used twice."""
    import comfy.controlnet

    class Control(comfy.controlnet.ControlBase):
        def get_control(self, x, *args):
            residual = 0.5 * noise(x.shape[0], tokens, 48, seed=9)
            return {"input": [residual, None, residual][:2], "output": [residual] * (kind == "flux")}

        def get_models(self):
            return []

        def copy(self):
            copy = Control()
            self.copy_to(copy)
            return copy

    options = {"control": Control(), "control_apply_to_uncond": True}
    conditioning = prompts(kind, positive=options)
    plain = sample(models[kind], kind)
    assert difference(assert_equal(models[kind], kind, conditioning=conditioning), plain) > 1e-3


def test_masks_timestep_ranges_and_default_prompts(models):
    latent = {"samples": noise(1, 16, 2, 8, 6), "noise_mask": (noise(1, 1, 2, 8, 6) > 0).float()}
    assert_equal(models["wan"], "wan", latent=latent, denoise=0.6, steps=5)
    early = prompts("qwen", positive={"start_percent": 0.0, "end_percent": 0.5})
    assert_equal(models["qwen"], "qwen", conditioning=early, steps=5)
    mask = torch.zeros(1, 8, 6)
    mask[..., :3] = 1
    conditioning = prompts("flux", positive={"mask": mask, "mask_strength": 1.0})
    rest = [[noise(1, 6, 40, seed=12), {"pooled_output": noise(1, 24, seed=3), "default": True}]]
    conditioning["positive"] += rest
    assert_equal(models["flux"], "flux", conditioning=conditioning)


def sample_in_tiles(model, kind):
    """As Ultimate SD Upscale does it: overlapping tiles, each sampled under a mask and put back."""
    image = noise(1, 16, 12, 14, seed=3)
    for left in (0, 5):
        mask = torch.zeros(1, 1, 12, 9)
        mask[..., 1:-1] = 1
        tile = {"samples": image[..., left : left + 9].clone(), "noise_mask": mask}
        image[..., left : left + 9] = sample(model, kind, latent=tile, denoise=0.5, sampler="euler_ancestral")
    return image


def test_tiles(models):
    here = sample_in_tiles(models["flux"], "flux")
    assert difference(here, noise(1, 16, 12, 14, seed=3)) > 1e-2
    assert difference(sample_in_tiles(parallel(models["flux"], ULYSSES_2), "flux"), here) <= TOLERANCE


def test_changes_to_the_model_object_that_workers_need_not_know(models):
    import comfy_extras.nodes_model_advanced as advanced

    shifted = advanced.ModelSamplingSD3().patch(models["wan"], 5.0)[0]
    plain = sample(models["wan"], "wan")
    assert difference(assert_equal(shifted, "wan"), plain) > 1e-3

    guided = models["wan"].clone()
    guided.set_model_sampler_cfg_function(lambda arguments: 0.9 * arguments["cond"])
    guided.set_model_sampler_post_cfg_function(lambda arguments: 1.01 * arguments["denoised"])
    assert difference(assert_equal(guided, "wan"), plain) > 1e-3


def test_compute_dtype(models):
    """ModelComputeDtype casts every layer's weights, and the next sampling is without it again."""
    import comfy_extras.nodes_model_advanced as advanced

    cast = advanced.ModelComputeDtype().patch(models["wan"], "bf16")[0]
    plain = sample(models["wan"], "wan")
    here = sample(cast, "wan")
    assert difference(here, plain) > 1e-4
    # bf16 has 8 bits: one rounding in another order shows as 2^-8 in the worst value.
    assert difference(sample(parallel(cast, ULYSSES_2), "wan"), here) <= 2**-7
    assert difference(sample(parallel(models["wan"], ULYSSES_2), "wan"), plain) <= TOLERANCE


def test_fp8_weights_computed_in_fp32(models):
    model = PATCHERS["qwen"].build()
    config = type(model.model.model_config)(dict(model.model.model_config.unet_config))
    config.set_inference_dtype(torch.float8_e4m3fn, torch.float32)
    config.unet_config["dtype"] = torch.float8_e4m3fn
    import comfy.model_patcher

    stored = config.get_model({}, "")
    source = dict(models["qwen"].model.diffusion_model.named_parameters())
    for name, parameter in stored.diffusion_model.named_parameters():
        parameter.requires_grad_(False).data.copy_(source[name].data.to(parameter.dtype))
    assert any(p.dtype == torch.float8_e4m3fn for p in stored.diffusion_model.parameters())
    cpu = torch.device("cpu")
    patcher = comfy.model_patcher.ModelPatcher(stored, load_device=cpu, offload_device=cpu)
    plain = assert_equal(patcher, "qwen")
    assert difference(assert_equal(with_lora(patcher), "qwen"), plain) > 1e-3


def test_tied_and_transposed_weights():
    model = PATCHERS["wan"].build()
    blocks = model.model.diffusion_model.blocks
    blocks[1].self_attn.q.weight = blocks[0].self_attn.q.weight
    linear = blocks[0].ffn[0]
    with torch.inference_mode():
        transposed = linear.weight.t().contiguous().t()
        linear.weight = torch.nn.Parameter(transposed, requires_grad=False)
    assert not linear.weight.is_contiguous()
    assert_equal(model, "wan")
    assert_equal(with_lora(model), "wan")


def perturbed_attention(model):
    from comfy_extras.nodes_pag import PerturbedAttentionGuidance as Node

    return Node.execute(model, 3.0).args[0] if hasattr(Node, "execute") else Node().patch(model, 3.0)[0]


def skip_layers(model):
    from comfy_extras.nodes_slg import SkipLayerGuidanceDiT as Node

    settings = {
        "scale": 3.0, "start_percent": 0.0, "end_percent": 1.0, "double_layers": "0", "single_layers": "0",
    }  # fmt: skip
    if hasattr(Node, "execute"):
        return Node.execute(model, **settings).args[0]
    return Node().skip_guidance(model, **settings)[0]


@pytest.mark.parametrize(("change", "name"), [(perturbed_attention, "attn1"), (skip_layers, "dit")])
def test_guidance_that_replaces_attention_is_refused_by_name(models, change, name):
    """These add their patch in mid-sampling only; the workers go on afterwards."""
    with pytest.raises(RequestError, match=f"patches_replace .{name}.*stock KSampler"):
        sample(parallel(change(models["flux"]), ULYSSES_2), "flux")
    assert_equal(models["flux"], "flux")


def test_hooked_weights_are_refused_each_time(models):
    import comfy.hooks

    down = {"diffusion_model.blocks.0.ffn.0.lora_up.weight": noise(72, 4),
            "diffusion_model.blocks.0.ffn.0.lora_down.weight": noise(4, 48)}  # fmt: skip
    conditioning = prompts("wan", positive={"hooks": comfy.hooks.create_hook_lora(down, 1.0, 1.0)})
    kept = parallel(models["wan"], ULYSSES_2)
    for _ in range(2):
        with pytest.raises(RequestError, match="hooked weights"):
            sample(kept, "wan", conditioning=conditioning)
    assert difference(sample(kept, "wan"), sample(models["wan"], "wan")) <= TOLERANCE


def test_other_ways_to_run_a_model_are_refused_by_name(models):
    split = models["wan"].clone()
    split.set_additional_models("multigpu", [PATCHERS["wan"].build()])
    with pytest.raises(RequestError, match=r"MultiGPU CFG Split.*Remove that node"):
        parallel(split, ULYSSES_2)
    compiled = models["wan"].clone()
    compiled.model_options["torch_compile_kwargs"] = {"backend": "inductor"}
    with pytest.raises(RequestError, match=r"torch.compile: inductor.*Remove that node"):
        parallel(compiled, ULYSSES_2)
