"""A bad value is named before anything runs."""

from __future__ import annotations

import pytest
from comfyui_ferry.core.errors import RequestError
from comfyui_ferry.core.training import LoraConfig, OffloadSettings, TrainingConfig


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


@pytest.mark.parametrize(("values", "named"), [({"rank": 0}, "rank=0"), ({"alpha": 0.0}, "alpha=0.0")])
def test_lora_values_out_of_range_are_refused(values, named):
    with pytest.raises(RequestError, match=named):
        LoraConfig(**values)


def test_optimizer_on_cpu_needs_offload():
    with pytest.raises(RequestError, match="offload off"):
        OffloadSettings(enabled=False, optimizer_on_cpu=True)
    with pytest.raises(RequestError, match="split_threshold_mb=-1"):
        OffloadSettings(split_threshold_mb=-1)
