"""A bad value is named before anything runs."""

from __future__ import annotations

import dataclasses

import pytest
from comfyui_ferry.core.errors import RequestError
from comfyui_ferry.core.training import LoraConfig, NoiseLevels, OffloadSettings, TrainingConfig
from comfyui_ferry.core.training.dataset import FolderOptions


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"steps": 0}, "steps=0"),
        ({"learning_rate": 0.0}, "learning_rate=0.0"),
        ({"learning_rate": float("nan")}, "learning_rate=nan"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"accumulation_steps": 0}, "grad_accumulation_steps=0"),
        ({"seed": -1}, "seed=-1"),
        ({"optimizer": "Adagrad"}, "optimizer='Adagrad'"),
        ({"loss": "BCE"}, "loss_function='BCE'"),
        ({"schedule": "sine"}, "lr_schedule='sine'"),
        ({"warmup_steps": 1}, "warmup_steps=1 was asked for 1 steps"),
        ({"max_gradient_norm": -1.0}, "max_grad_norm=-1.0"),
        ({"weight_decay": float("inf")}, "weight_decay=inf"),
        ({"ema_decay": 1.0}, "ema_decay=1.0"),
        ({"optimizer": "AdamWScheduleFree", "ema_decay": 0.9}, "averages the weights itself"),
        ({"optimizer": "AdamWScheduleFree", "schedule": "cosine"}, "lr_schedule"),
    ],
)
def test_training_values_out_of_range_are_refused(values, named):
    with pytest.raises(RequestError, match=named):
        TrainingConfig(**({"steps": 1, "learning_rate": 1e-3} | values))


NUMBERS = [
    (LoraConfig, {}, "rank alpha"),
    (
        TrainingConfig,
        {"steps": 9, "learning_rate": 1e-3},
        "steps learning_rate batch_size accumulation_steps",
    ),
    (TrainingConfig, {"steps": 9, "learning_rate": 1e-3}, "seed warmup_steps weight_decay"),
    (TrainingConfig, {"steps": 9, "learning_rate": 1e-3}, "max_gradient_norm ema_decay"),
    (OffloadSettings, {}, "split_threshold_mb modulation_cache_mb vram_budget_gb ram_budget_gb"),
    (NoiseLevels, {}, "shift lowest highest"),
    (
        FolderOptions,
        {},
        "resolution_px step_px repeats caption_dropout max_upscale video_frames video_rate_hz",
    ),
]


@pytest.mark.parametrize(("kind", "needed", "names"), NUMBERS)
def test_what_is_no_number_of_its_kind_is_refused_by_name(kind, needed, names):
    """NaN, infinite, negative, of another type, and a fraction where something is counted."""
    for name in names.split():
        present = getattr(kind(**needed), name)
        bad = [float("nan"), float("inf"), -float("inf"), -1, "4", [1], True, 10**400, 1j]
        for value in [*bad, *([1.5, 2.0] if isinstance(present, int) else [])]:
            with pytest.raises(RequestError, match=" was asked") as refused:
                kind(**(needed | {name: value}))
            assert f"={value!r} was asked" in str(refused.value), name


def test_every_number_of_the_settings_is_in_the_table_of_this_test():
    for kind in {kind for kind, _, _ in NUMBERS}:
        tested = {name for other, _, names in NUMBERS if other is kind for name in names.split()}
        hints = {field.name: str(field.type) for field in dataclasses.fields(kind)}
        assert {name for name, hint in hints.items() if "int" in hint or "float" in hint} == tested


def test_optimizer_on_cpu_needs_offload():
    with pytest.raises(RequestError, match="offload off"):
        OffloadSettings(enabled=False, optimizer_on_cpu=True)
    with pytest.raises(RequestError, match="split_threshold_mb=-1"):
        OffloadSettings(split_threshold_mb=-1)
