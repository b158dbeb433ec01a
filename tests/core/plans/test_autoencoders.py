"""Decoding on several ranks equals decoding on one: real gloo processes, tiny models of ComfyUI's classes."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from comfyui_ferry.core.errors import RequestError
from comfyui_ferry.core.parallel import cut_dim, dotted_path, parallelize_decoder
from comfyui_ferry.core.plans import AUTOENCODER_PLANS, find_autoencoder_plan
from ferry_support.model_sections import PartRow, check_part, skip_without_results
from ferry_support.parity import TOLERANCE
from ferry_support.ranks import run_ranks
from ferry_support.tiny_autoencoders import build_hunyuan_video, build_kl, build_ltx, build_wan, latent
from ferry_support.tiny_models import is_newer_comfyui
from torch import nn

pytestmark = pytest.mark.comfy

# Uneven strips in every world; one wide latent is cut along its width, and one row a rank is the least.
CASES: dict[str, tuple[Callable[[], nn.Module], list[tuple[int, ...]]]] = {
    "AutoencoderKL": (build_kl, [(2, 4, 11, 7), (1, 4, 5, 13), (1, 4, 4, 3), (1, 4, 1, 1)]),
    "AutoencodingEngine": (lambda: build_kl(legacy=False), [(1, 4, 11, 6)]),
    "Wan 2.1": (lambda: build_wan("2.1"), [(1, 4, 1, 7, 5), (1, 4, 4, 5, 3)]),
    "Wan 2.2": (lambda: build_wan("2.2"), [(1, 4, 1, 7, 5), (2, 4, 3, 3, 5)]),
    "HunyuanVideo 1.0": (lambda: build_hunyuan_video(version="1.0"), [(1, 4, 3, 7, 5)]),
    "HunyuanVideo 1.5": (lambda: build_hunyuan_video(version="1.5"), [(1, 4, 5, 7, 5), (2, 4, 1, 3, 4)]),
    "HunyuanImage 2.1": (lambda: build_hunyuan_video(version="image"), [(1, 4, 5, 7)]),
    "LTX-2": (build_ltx, [(2, 128, 4, 7, 5), (1, 128, 3, 4, 6)]),
    "LTX-Video, noise": (lambda: build_ltx(noisy=True), [(1, 128, 3, 7, 5), (1, 128, 2, 2, 3)]),
}
NEWER = {"FLUX.2": (lambda: build_kl(batch_norm=True), [(1, 16, 7, 5)])}


ROWS = (
    PartRow(
        "AutoencoderKL",
        "Stable Diffusion 1 and 2, SDXL",
        ("AutoencoderKL",),
    ),
    PartRow(
        "AutoencodingEngine",
        "Stable Diffusion 3, FLUX.1, Z-Image, Ovis-Image, LongCat-Image",
        ("AutoencodingEngine",),
    ),
    PartRow("AutoencoderKL with normalised latents", "FLUX.2", ("FLUX.2",), newer_only=True),
    PartRow("WanVAE 2.1", "Wan 2.1 and 2.2 A14B, Qwen-Image", ("Wan 2.1",)),
    PartRow("WanVAE 2.2", "Wan 2.2 TI2V-5B", ("Wan 2.2",)),
    PartRow("AutoencoderKL, 3D", "HunyuanVideo 1.0", ("HunyuanVideo 1.0",)),
    PartRow("vae_refiner.Decoder", "HunyuanVideo 1.5", ("HunyuanVideo 1.5",)),
    PartRow("hunyuan_video.vae.Decoder", "HunyuanImage 2.1", ("HunyuanImage 2.1",)),
    PartRow("VideoVAE", "LTX-Video, LTX-2", ("LTX-2", "LTX-Video, noise"), newer_only=True),
)
INTRO = """\
By *Parallel VAE*: strips of uneven heights, cut along rows or columns, equal the picture of one process to
1e-5 of its largest value. The noise that LTX-Video's VAE draws is the same as well."""
Pictures = tuple[dict[str, nn.Module], dict[str, list[torch.Tensor]], dict[str, list[torch.Tensor]]]
# Case -> ranks -> error, of this run.
SEEN: dict[str, dict[int, float]] = {}


def _decode(model: Any, whole: torch.Tensor) -> torch.Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return model.decode(whole)


def _limit_chunks(patch: pytest.MonkeyPatch, *, rank: int = 0) -> None:
    """Make newer LTX decode few frames at once, with another limit on each rank, as GPUs may have."""
    module = importlib.import_module("comfy.ldm.lightricks.vae.causal_video_autoencoder")
    if is_newer_comfyui():
        patch.setattr(module, "get_max_chunk_size", lambda device: 20_000 + 9_000 * rank)


def decode_on_ranks(models: dict[str, nn.Module], latents: dict[str, list[torch.Tensor]]) -> dict[str, Any]:
    """Return this rank's strips, and whether taking the hooks off leaves the model as it was."""
    seen = {}
    for name, module in models.items():
        model: Any = module
        plan = find_autoencoder_plan(dotted_path(model), dotted_path(model.decoder))
        before = {path: dict(module.__dict__) for path, module in model.named_modules()}
        handle = parallelize_decoder(model, plan, group=dist.group.WORLD)
        with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
            _limit_chunks(patch, rank=dist.get_rank())
            strips = [
                handle.decode(model.decode, each, generator=torch.Generator().manual_seed(5))
                for each in latents[name]
            ]
        handle.remove()
        after = {path: dict(module.__dict__) for path, module in model.named_modules()}
        seen[name] = (strips, before == after)
    return seen


@pytest.fixture(scope="module")
def pictures() -> Pictures:
    """Models, latents and pictures of every case."""
    cases = CASES | (NEWER if is_newer_comfyui() else {})
    models = {name: build() for name, (build, _) in cases.items()}
    latents = {name: [latent(*shape) for shape in shapes] for name, (_, shapes) in cases.items()}
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        _limit_chunks(patch)
        expected = {name: [_decode(model, each) for each in latents[name]] for name, model in models.items()}
    return models, latents, expected


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_strips_are_the_picture(pictures: Pictures, world_size: int) -> None:
    models, latents, expected = pictures
    ranks = run_ranks(decode_on_ranks, world_size, models, latents, timeout_s=150)
    for name, wholes in expected.items():
        assert all(seen[name][1] for seen in ranks), name
        for index, whole in enumerate(wholes):
            strips = [seen[name][0][index] for seen in ranks]
            joined = torch.cat(strips, dim=cut_dim(latents[name][index]))
            # fp32: sums over strips in another order.
            error = (joined - whole).abs().max() / whole.abs().max()
            assert joined.shape == whole.shape and error <= TOLERANCE, (name, index, float(error))
            if world_size > 1:
                SEEN.setdefault(name, {})[world_size] = float(error)
            if 1 < world_size <= max(latents[name][index].shape[-2:]):
                assert max(strip.numel() for strip in strips) < whole.numel()


def test_the_published_table_is_what_was_seen() -> None:
    skip_without_results({len(errors) for errors in SEEN.values()} != {3})
    check_part("autoencoders", "VAEs", INTRO, ROWS, SEEN)


def test_plain_tiles_would_differ() -> None:
    """The comparison above can fail: a strip decoded by itself is another picture."""
    model: Any = build_kl()
    whole = latent(1, 4, 10, 6)
    with torch.inference_mode():
        tiles = torch.cat([model.decode(part) for part in whole.split(5, dim=-2)], dim=-2)
        expected = model.decode(whole)
    assert (tiles - expected).abs().max() > 0.05 * expected.abs().max()


def test_every_layer_of_the_real_sizes_is_planned() -> None:
    from comfyui_ferry.core.parallel import planned_modules

    for build, _ in CASES.values():
        model: Any = build()
        plan = find_autoencoder_plan(dotted_path(model), dotted_path(model.decoder))
        assert plan in AUTOENCODER_PLANS
        assert len(planned_modules(model, plan)) == sum(
            len(list(getattr(model, part).modules())) for part in plan.parts if hasattr(model, part)
        )


def test_others_are_refused_by_name() -> None:
    from comfyui_ferry.core.parallel import planned_modules

    with pytest.raises(RequestError, match=r"comfy\.taesd\.TAESD .*VAEs with a plan are AutoencoderKL"):
        find_autoencoder_plan("comfy.taesd.TAESD", "comfy.taesd.Decoder")
    model: Any = build_kl()
    model.decoder.conv_out = nn.AvgPool2d(3, 1, 1)
    plan = find_autoencoder_plan(dotted_path(model), dotted_path(model.decoder))
    with pytest.raises(RequestError, match=r"decoder\.conv_out is a torch\.nn\.modules\.pooling\.AvgPool2d"):
        planned_modules(model, plan)
    model = build_kl()
    model.decoder.conv_out.stride = (2, 2)
    with pytest.raises(RequestError, match=r"decoder\.conv_out has stride 2"):
        planned_modules(model, plan)
