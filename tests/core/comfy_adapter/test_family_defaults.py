"""What ``auto`` stands for: recognised on real model classes, and it learns."""

from __future__ import annotations

import itertools

import pytest
import torch
from comfyui_ferry.core.errors import RequestError
from ferry_support.tiny_models import noise
from ferry_support.tiny_patchers import PATCHERS

pytestmark = [pytest.mark.comfy, pytest.mark.timeout(300)]

# Adam's step is the same for every weight, and a layer adds up as many as it is wide: the tiny networks
# are 10 to 100 times narrower than the ones that the learning rates are for.
FULL_WIDTH = {"flux": 3072, "qwen": 3072, "wan": 5120, "z-image": 3840, "sd3": 2432, "sdxl": 1280}
# Z-Image normalises what attention and MLP give, so a step turns it, however wide the layer is: it gets the
# factor of the networks of width 48. With its own width's, 13.7, 40 steps do not learn half as much.
TINY_WIDTH = {"flux": 48, "qwen": 48, "wan": 48, "z-image": 60, "sd3": 128, "sdxl": 128}
STEPS = {"z-image": 40, "FLUX.2-klein": 60}
BATCH_SIZE = {"FLUX.2-klein": 1}  # its captions are padded to 512 tokens
# The last 8 losses by the first 8, and the sample's distance from the picture with by without the LoRA.
# Seen over three seeds: flux 0.30-0.36 and 0.35, qwen 0.49-0.62 and 0.81-0.88, wan 0.44-0.47 and 0.45,
# sd3 0.45-0.48 and 0.59, sdxl 0.70-0.77 and 0.82-0.84, klein 0.45-0.56 and 0.78-0.85, LongCat 0.48-0.53 and
# 0.69-0.72, Ovis 0.55-0.66 and 0.78-0.85, Z-Image 0.60-0.64 and 0.83-0.85.
LIMITS = {
    "flux": (0.5, 0.5),
    "qwen": (0.75, 0.95),
    "wan": (0.6, 0.6),
    "z-image": (0.75, 0.92),
    "sd3": (0.65, 0.75),
    "sdxl": (0.85, 0.92),
    "FLUX.2-klein": (0.75, 0.9),
    "LongCat-Image": (0.7, 0.85),
    "Ovis-Image": (0.8, 0.95),
}


NEWER_FLUX = {
    "FLUX.2-klein": ("Flux2", {
        "image_model": "flux2", "in_channels": 128, "out_channels": 128, "vec_in_dim": None, "patch_size": 1,
        "context_in_dim": 60, "mlp_ratio": 3.0, "axes_dim": [4] * 4, "theta": 2000, "qkv_bias": False,
        "guidance_embed": False, "txt_ids_dims": [3], "ops_bias": False, "global_modulation": True,
        "mlp_silu_act": True, "default_ref_method": "index", "ref_index_scale": 10.0,
    }),
    "LongCat-Image": ("LongCatImage", {
        "vec_in_dim": None, "context_in_dim": 3584, "guidance_embed": False, "txt_ids_dims": [1, 2],
    }),
    "Ovis-Image": ("FluxSchnell", {
        "vec_in_dim": None, "context_in_dim": 2048, "guidance_embed": False, "txt_ids_dims": [1, 2],
        "yak_mlp": True, "txt_norm": True,
    }),
}  # fmt: skip


def newer_flux(name):
    """A tiny model of a family that ComfyUI 0.3.75 lacks."""
    from ferry_support.tiny_models import is_newer_comfyui
    from ferry_support.tiny_patchers import TinyPatcher, build_patcher

    if not is_newer_comfyui():
        pytest.skip("this ComfyUI has no such models")
    kind, changes = NEWER_FLUX[name]
    config = {
        "image_model": "flux", "in_channels": 16, "out_channels": 16, "hidden_size": 48, "mlp_ratio": 4.0,
        "num_heads": 3, "depth": 2, "depth_single_blocks": 2, "axes_dim": [4, 6, 6], "theta": 10000,
        "patch_size": 2, "qkv_bias": True,
    } | changes  # fmt: skip
    shape = (128, 4, 3) if config["patch_size"] == 1 else (16, 8, 6)
    return TinyPatcher(
        lambda: build_patcher(kind, dict(config)), shape, config["context_in_dim"], lambda _: {}
    )


def node_values(**changes):
    from comfyui_ferry.nodes.training import TrainLoraOffload

    defaults = {
        entry.id: entry.default
        for entry in TrainLoraOffload.define_schema().inputs
        if getattr(entry, "default", None) is not None
    }
    quick = {"save_prefix": "", "keep_states": 0, "offload": False, "gradient_checkpointing": False}
    return defaults | quick | changes


def overfit(kind, *, seed=0, **changes):
    """Train on one latent with all values on auto; return model, latent, losses and the LoRA."""
    from comfyui_ferry.core.comfy_adapter import TrainingRequest, fill_auto, run_lora_training

    tiny = newer_flux(kind) if kind in NEWER_FLUX else PATCHERS[kind]
    model = tiny.build()
    wider = FULL_WIDTH.get(kind, 3072) / TINY_WIDTH.get(kind, 48)
    rate = fill_auto(model, node_values()).values["learning_rate"] * wider
    usual = {"steps": STEPS.get(kind, 24), "batch_size": BATCH_SIZE.get(kind, 2)}
    widgets = node_values(**(usual | {"seed": seed, "learning_rate": rate} | changes))
    filled = fill_auto(model, widgets)
    latent = {"samples": 0.5 * noise(1, *tiny.latent_shape, seed=3)}
    caption = tiny.caption(1)
    if kind == "qwen":
        caption[0][1]["reference_latents"] = [noise(1, 16, 1, 6, 4)]
    request = TrainingRequest.from_widgets(filled.values, plan=filled.plan)
    with torch.inference_mode():
        result = run_lora_training(model, [latent], [caption], request)
    return model, latent["samples"], caption, result


def sample(model, caption, shape):
    import nodes

    with torch.inference_mode():
        latent = {"samples": torch.zeros(1, *shape)}
        return nodes.common_ksampler(model, 5, 6, 1.0, "euler", "simple", caption, caption, latent)[0][
            "samples"
        ]


def with_lora(model, lora):
    import comfy_extras.nodes_train as nodes_train

    with torch.inference_mode():
        return nodes_train.LoraModelLoader.execute(model, lora, 1.0).args[0]


@pytest.mark.parametrize(
    "kind",
    # Wan's two experts have a test of their own.
    [pytest.param(kind, marks=[pytest.mark.slow] if kind == "wan" else []) for kind in LIMITS],
)
def test_the_defaults_learn_one_picture(kind):
    model, target, caption, result = overfit(kind)
    losses = result.loss_map["loss"]
    loss_limit, distance_limit = LIMITS[kind]
    assert sum(losses[-8:]) < loss_limit * sum(losses[:8])
    shape = tuple(target.shape[1:])
    without = (sample(model, caption, shape) - target).norm()
    moved = (sample(with_lora(model, result.lora), caption, shape) - target).norm()
    assert float(moved) < distance_limit * float(without)


def test_two_experts_learn_their_own_noise_and_make_the_picture_together(output, monkeypatch):
    """Trained apart as a person does, loaded from their files, sampled one behind the other."""
    import comfy.sd
    import comfy.utils
    from comfyui_ferry.core.comfy_adapter.training import ComfyProcess

    import nodes

    drawn, original = [], ComfyProcess.sigmas

    def sigmas(process, positions):
        drawn.append(original(process, positions))
        return drawn[-1]

    monkeypatch.setattr(ComfyProcess, "sigmas", sigmas)
    experts, ranges = {}, {}
    for name in ("high", "low"):
        drawn.clear()
        model, target, caption, result = overfit("wan", noise_range=name, save_prefix=f"loras/cat_{name}")
        trained = torch.cat(drawn)
        ranges[name] = float(trained.min()), float(trained.max())
        lora, header = comfy.utils.load_torch_file(str(result.path), return_metadata=True)
        assert header["noise_levels"] == {"high": "0.875 to 1", "low": "0 to 0.875"}[name]
        with torch.inference_mode():
            patched, _ = comfy.sd.load_lora_for_models(model, None, lora, 1.0, 0.0)
        experts[name] = (model, patched)
    assert 0 < ranges["low"][0] < 0.5 < ranges["low"][1] <= 0.875 <= ranges["high"][0]

    def distance(high, low):
        """As the template does it: down to the boundary by one expert, from there on by the other."""
        latent = {"samples": torch.zeros_like(target)}
        with torch.inference_mode():
            common = (6, 1.0, "euler", "simple", caption, caption)
            half = nodes.KSamplerAdvanced().sample(
                experts["high"][high], "enable", 5, *common, latent, 0, 4, "enable"
            )[0]
            whole = nodes.KSamplerAdvanced().sample(
                experts["low"][low], "disable", 5, *common, half, 4, 10000, "disable"
            )[0]
        return float((whole["samples"] - target).norm())

    # Seen: 0.44 of the distance without, high alone 0.85, low alone 0.52.
    both, neither = distance(1, 1), distance(0, 0)
    assert both < 0.6 * neither
    assert both < min(distance(1, 0), distance(0, 1))


def fill(kind, model=None, **changes):
    from comfyui_ferry.core.comfy_adapter import fill_auto

    return fill_auto(model or PATCHERS[kind].build(), node_values(**changes))


def test_auto_takes_the_familys_values_and_says_so():
    filled = fill("flux")
    assert filled.plan == (
        "FLUX.1-dev: rank 16 (auto), alpha 16 (auto), learning rate 0.0001 (auto), layers attention and MLP "
        "of all blocks, MSE loss (auto), logit_normal noise levels (auto), shift 3.158 (auto), guidance 1 "
        "(auto)"
    )
    sdxl = fill("sdxl", rank=8, learning_rate=0.01)
    assert (sdxl.values["rank"], sdxl.values["alpha"], sdxl.values["learning_rate"]) == (8, 4.0, 0.01)
    assert sdxl.plan == (
        "SDXL: rank 8, alpha 4 (auto), learning rate 0.01, layers attention and MLP of all blocks, MSE loss "
        "(auto), uniform noise levels (auto), the model's own shift, min_snr weights (auto)"
    )
    prodigy = fill("sdxl", optimizer="Prodigy")
    assert prodigy.values["learning_rate"] == 1.0 and "learning rate 1 (auto)" in prodigy.plan
    assert fill("flux", optimizer="SGD", learning_rate=0.1).values["learning_rate"] == 0.1
    with pytest.raises(RequestError, match="optimizer='SGD'"):
        fill("flux", optimizer="SGD")
    assert fill("z-image").values["targets"] == "layers.*.attention, layers.*.feed_forward"
    assert fill("z-image", targets="layers").values["targets"] == "layers"
    more = fill("z-image", targets="+norms")
    assert more.values["targets"] == "layers.*.attention, layers.*.feed_forward, +norms"
    assert "layers attention and MLP of all blocks, +norms," in fill("flux", targets="+norms").plan
    names = {kind: fill(kind).plan.split(":")[0] for kind in ("qwen", "wan", "sd3")}
    assert names == {"qwen": "Qwen-Image (Edit)", "wan": "Wan 2.1 and 2.2", "sd3": "Stable Diffusion 3.5"}


def test_values_of_ones_own_are_kept():
    from comfyui_ferry.core.comfy_adapter import TrainingRequest

    own = {
        "rank": 3, "alpha": 5.0, "learning_rate": 0.5, "loss_function": "L1", "timestep_sampling": "uniform",
        "timestep_shift": 7.0, "loss_weighting": "none", "guidance": 4.0,
    }  # fmt: skip
    filled = fill("flux", **own)
    assert own.items() <= filled.values.items()
    assert "auto" not in filled.plan
    request = TrainingRequest.from_widgets(filled.values)
    assert (request.guidance.value, request.guidance.replaces) == (4.0, True)
    assert request.levels.shift == 7.0


def test_the_experts_of_wan_get_their_noise():
    values = {name: fill("wan", noise_range=name).values for name in ("auto", "high", "low")}
    assert [(value["lowest_noise"], value["highest_noise"]) for value in values.values()] == [
        (0.0, 1.0),
        (0.875, 1.0),
        (0.0, 0.875),
    ]
    with pytest.raises(RequestError, match=r"noise_range='high' was asked .* FLUX.1-dev"):
        fill("flux", noise_range="high")
    for name, value in itertools.product(("guidance", "rank"), (float("nan"), "4", -3, [])):
        with pytest.raises(RequestError, match=f"{name}=.* was asked"):
            fill("flux", **{name: value})
    with pytest.raises(RequestError, match=r"guidance=3.5 was asked .* Wan"):
        fill("wan", guidance=3.5)


def test_guidance_is_set_only_where_it_should_be():
    from comfyui_ferry.core.comfy_adapter.training_inputs import Guidance, read_samples

    tiny = PATCHERS["flux"]
    model = tiny.build()
    own = tiny.caption(0)
    bare = [[own[0][0], {key: value for key, value in own[0][1].items() if key != "guidance"}]]

    def seen(caption, guidance):
        (sample,) = read_samples(model, [tiny.latent()], [caption], guidance=guidance)
        return sample.condition.entry[1].get("guidance")

    assert [seen(own, None), seen(bare, None)] == [3.5, None]
    assert [seen(own, Guidance(1.0)), seen(bare, Guidance(1.0))] == [3.5, 1.0]
    assert [seen(own, Guidance(1.0, replaces=True)), seen(bare, Guidance(1.0, replaces=True))] == [1.0, 1.0]
    assert own[0][1]["guidance"] == 3.5


def test_prompts_from_before_these_inputs_still_work():
    from comfyui_ferry.core.comfy_adapter import TrainingRequest, fill_auto

    later = ("timestep_sampling", "timestep_shift", "loss_weighting", "guidance", "noise_range")
    values = {name: value for name, value in node_values().items() if name not in later}
    assert TrainingRequest.from_widgets(fill_auto(PATCHERS["wan"].build(), values).values).levels.is_whole


@pytest.mark.parametrize("name", NEWER_FLUX)
def test_the_newer_families_of_the_flux_class_are_told_apart(name):
    assert fill("flux", newer_flux(name).build()).plan.startswith(f"{name}: rank 16 (auto)")
