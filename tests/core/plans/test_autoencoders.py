"""Decoding on several ranks equals decoding on one: real gloo processes, tiny models of ComfyUI's classes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from comfyui_ferry.core.errors import RequestError
from comfyui_ferry.core.parallel import cut_dim, dotted_path, parallelize_decoder
from comfyui_ferry.core.plans import AUTOENCODER_PLANS, find_autoencoder_plan
from ferry_support.parity import TOLERANCE
from ferry_support.ranks import run_ranks
from ferry_support.tiny_autoencoders import build_kl, build_wan, latent
from ferry_support.tiny_models import is_newer_comfyui
from torch import nn

pytestmark = pytest.mark.comfy

# Uneven strips in every world; one wide latent is cut along its width, and one row a rank is the least.
CASES: dict[str, tuple[Callable[[], nn.Module], list[tuple[int, ...]]]] = {
    "AutoencoderKL": (build_kl, [(2, 4, 11, 7), (1, 4, 5, 13), (1, 4, 4, 3), (1, 4, 1, 1)]),
    "AutoencodingEngine": (lambda: build_kl(legacy=False), [(1, 4, 11, 6)]),
    "Wan 2.1": (lambda: build_wan("2.1"), [(1, 4, 1, 7, 5), (1, 4, 4, 5, 3)]),
    "Wan 2.2": (lambda: build_wan("2.2"), [(1, 4, 1, 7, 5), (2, 4, 3, 3, 5)]),
}
NEWER = {"FLUX.2": (lambda: build_kl(batch_norm=True), [(1, 16, 7, 5)])}


def _decode(model: Any, whole: torch.Tensor) -> torch.Tensor:
    return model.decode(whole)


def decode_on_ranks(models: dict[str, nn.Module], latents: dict[str, list[torch.Tensor]]) -> dict[str, Any]:
    """Return this rank's strips, and whether taking the hooks off leaves the model as it was."""
    seen = {}
    for name, module in models.items():
        model: Any = module
        plan = find_autoencoder_plan(dotted_path(model), dotted_path(model.decoder))
        before = {path: dict(module.__dict__) for path, module in model.named_modules()}
        handle = parallelize_decoder(model, plan, group=dist.group.WORLD)
        with torch.inference_mode():
            strips = [handle.decode(model.decode, each) for each in latents[name]]
        handle.remove()
        after = {path: dict(module.__dict__) for path, module in model.named_modules()}
        seen[name] = (strips, before == after)
    return seen


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_strips_are_the_picture(world_size: int) -> None:
    cases = CASES | (NEWER if is_newer_comfyui() else {})
    models = {name: build() for name, (build, _) in cases.items()}
    latents = {name: [latent(*shape) for shape in shapes] for name, (_, shapes) in cases.items()}
    with torch.inference_mode():
        expected = {name: [_decode(model, each) for each in latents[name]] for name, model in models.items()}
    ranks = run_ranks(decode_on_ranks, world_size, models, latents)
    for name in cases:
        assert all(seen[name][1] for seen in ranks), name
        for index, whole in enumerate(expected[name]):
            strips = [seen[name][0][index] for seen in ranks]
            joined = torch.cat(strips, dim=cut_dim(latents[name][index]))
            # fp32: sums over strips in another order.
            error = (joined - whole).abs().max() / whole.abs().max()
            assert joined.shape == whole.shape and error <= TOLERANCE, (name, index, float(error))
            if min(latents[name][index].shape[-2:]) > 1:
                assert max(strip.numel() for strip in strips) < whole.numel()


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
