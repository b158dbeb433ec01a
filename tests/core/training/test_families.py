"""Families are told apart, and their values are ones that the trainer takes."""

from __future__ import annotations

import pytest
from comfyui_ferry.core.training import LOSSES, LoraConfig, TrainingConfig
from comfyui_ferry.core.training.families import FAMILIES, OTHER, bucket_step_px, find_family

FLUX = "comfy.ldm.flux.model.Flux"
FLUX1 = {"image_model": "flux", "vec_in_dim": 768, "context_in_dim": 4096}


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (FLUX1 | {"guidance_embed": True}, "FLUX.1-dev"),
        (FLUX1 | {"guidance_embed": False}, "FLUX.1-schnell"),
        ({"image_model": "flux2", "guidance_embed": True}, "FLUX.2-dev"),
        ({"image_model": "flux2", "guidance_embed": False}, "FLUX.2-klein"),
        ({"image_model": "flux", "vec_in_dim": None, "context_in_dim": 3584}, "LongCat-Image"),
        ({"image_model": "flux", "vec_in_dim": None, "context_in_dim": 2048, "yak_mlp": True}, "Ovis-Image"),
        ({"image_model": "chroma"}, "other"),
    ],
)
def test_one_class_runs_several_families(config, name):
    assert find_family(FLUX, config).name == name


def test_other_models_get_defaults_that_need_no_family():
    assert find_family("comfy.ldm.new.Model", {}) is OTHER
    assert find_family("", {}) is OTHER


@pytest.mark.parametrize("family", [*FAMILIES, OTHER], ids=lambda family: family.name)
def test_the_values_are_valid(family):
    assert LoraConfig(family.rank, family.alpha, family.targets)
    assert TrainingConfig(steps=1, learning_rate=family.learning_rate)
    assert family.loss in LOSSES
    assert bucket_step_px(family.name) == family.bucket_step_px
    assert OTHER.bucket_step_px % family.bucket_step_px == 0
    assert family.expert_boundary is None or 0 < family.expert_boundary < 1
