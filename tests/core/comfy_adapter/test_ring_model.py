"""Whole samplings by Ring, and by Ulysses x Ring, equal sampling in this process.

Tolerance 1e-5 relative in fp32: the same products, added in another order (about 1e-6 is seen).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from comfyui_ferry.core.errors import RequestError
from ferry_support.parity import TOLERANCE, relative_error
from ferry_support.tiny_models import is_newer_comfyui
from ferry_support.tiny_patchers import PATCHERS

pytestmark = [pytest.mark.comfy, pytest.mark.timeout(300)]


KINDS = {kind: PATCHERS[kind] for kind in ("flux", "wan", "sd3", "z-image", "sdxl", "ltx2")}


def settings_of(kind: str) -> dict[str, Any]:
    return {
        "seed": 5, "steps": 2, "cfg": 3.0, "sampler_name": "euler", "scheduler": "simple",
        "positive": KINDS[kind].caption(1, tokens=11), "negative": KINDS[kind].caption(2, tokens=5),
        "denoise": 1.0,
    }  # fmt: skip


def parts_of(samples: Any) -> list[torch.Tensor]:
    """Return the latents of a LATENT: one, or video and audio."""
    return list(samples.unbind()) if getattr(samples, "is_nested", False) else [samples]


def sample_here(kind: str, model: Any) -> list[torch.Tensor]:
    import nodes

    latent = KINDS[kind].latent()
    with torch.inference_mode():
        return parts_of(nodes.common_ksampler(model, latent=latent, **settings_of(kind))[0]["samples"])


def sample_on_workers(kind: str, model: Any, **degrees: int) -> list[torch.Tensor]:
    from comfyui_ferry.core.comfy_adapter import sample_parallel

    latent = KINDS[kind].latent()
    with torch.inference_mode():
        output = sample_parallel(model, latent=latent, **degrees, **settings_of(kind))
        return parts_of(output["samples"])


def test_ring_and_hybrid_equal_one_process() -> None:
    # Models take turns on one group of workers, so each group is started once.
    kinds = [kind for kind in KINDS if kind != "ltx2" or is_newer_comfyui()]
    changes = {"sdxl": {"model_channels": 128}}  # two heads at the least
    models = {kind: KINDS[kind].build(**changes.get(kind, {})) for kind in kinds}
    expected = {kind: sample_here(kind, model) for kind, model in models.items()}
    for degrees in (
        {"gpus": 2, "cfg_degree": 1, "ulysses_degree": 1, "ring_degree": 2},
        {"gpus": 4, "cfg_degree": 1, "ulysses_degree": 2, "ring_degree": 2},
    ):
        for kind, model in models.items():
            output = sample_on_workers(kind, model, **degrees)
            assert relative_error(output, expected[kind]) <= TOLERANCE, (kind, degrees)


def test_the_product_with_ring_must_be_the_number_of_gpus() -> None:
    model = KINDS["flux"].build()
    with pytest.raises(RequestError, match=r"cfg 1 x batch 1 x tp 1 x ring 3 x ulysses 2 = 6"):
        sample_on_workers("flux", model, gpus=4, cfg_degree=1, ulysses_degree=2, ring_degree=3)


def test_ring_has_no_head_limit_but_hybrid_keeps_that_of_ulysses() -> None:
    from comfyui_ferry.core.comfy_adapter import make_parallel

    model = KINDS["flux"].build()  # three heads
    make_parallel(model, gpus=5, cfg_degree=1, ulysses_degree=1, ring_degree=5)
    with pytest.raises(RequestError, match=r"ulysses_degree=4 .* this model has 3"):
        make_parallel(model, gpus=8, cfg_degree=1, ulysses_degree=4, ring_degree=2)
