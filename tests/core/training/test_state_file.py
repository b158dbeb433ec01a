"""A state reads back as it was; anything else is refused by name."""

from __future__ import annotations

import dataclasses
import math
import os

import pytest
import torch
from comfyui_ferry.core.errors import RequestError, SaveError
from comfyui_ferry.core.training import TrainingState, check_identity, read_state, save_state
from comfyui_ferry.core.training.trained_weights import WeightsState
from safetensors.torch import save_file


def state(**changes):
    weights = WeightsState(
        parameters={"a.up": torch.tensor([1.0, math.nan])},
        averages={"a.up": torch.tensor([0.1, 0.2])},
        optimizer={
            "state": {0: {"step": torch.tensor(3.0), "inner": {"x": torch.arange(3, dtype=torch.uint8)}}},
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.999), "d": math.inf, "k": None, "params": [0]}],
        },
    )
    values = {"step": 2, "attempt": 3, "losses": [0.1, 1 / 3], "weights": weights, "unused": ["b"]}
    return TrainingState(**(values | {"identity": {"rank": "4"}} | changes))


def test_everything_reads_back(tmp_path):
    path = tmp_path / "state.safetensors"
    save_state(path, state())
    read = read_state(path)
    expected = state()
    assert dataclasses.replace(read, weights=None) == dataclasses.replace(expected, weights=None)
    assert read.weights.parameters["a.up"].isnan().tolist() == [False, True]
    assert torch.equal(read.weights.averages["a.up"], expected.weights.averages["a.up"])
    assert read.weights.optimizer["param_groups"] == expected.weights.optimizer["param_groups"]
    moments, original = read.weights.optimizer["state"][0], expected.weights.optimizer["state"][0]
    assert torch.equal(moments["step"], original["step"])
    assert torch.equal(moments["inner"]["x"], original["inner"]["x"])


def test_an_object_is_refused_and_nothing_is_written(tmp_path):
    weights = dataclasses.replace(state().weights, optimizer={"state": {0: {"x": object()}}})
    with pytest.raises(Exception, match="keeps a object"):
        save_state(tmp_path / "state.safetensors", state(weights=weights))
    assert os.listdir(tmp_path) == []


def test_a_full_disk_leaves_older_states_as_they_are(tmp_path, monkeypatch):
    save_state(tmp_path / "1.safetensors", state())

    def fail(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(SaveError, match="No space left"):
        save_state(tmp_path / "2.safetensors", state())
    assert os.listdir(tmp_path) == ["1.safetensors"]
    assert read_state(tmp_path / "1.safetensors").step == 2


@pytest.mark.parametrize("broken", ["missing", "cut", "text", "lora"])
def test_what_is_no_state_is_refused(tmp_path, broken):
    path = tmp_path / "state.safetensors"
    if broken == "cut":
        save_state(path, state())
        path.write_bytes(path.read_bytes()[:-3])
    elif broken == "text":
        path.write_text("hello")
    elif broken == "lora":
        save_file({"a": torch.ones(1)}, path)
    with pytest.raises(RequestError, match=r"state\.safetensors"):
        read_state(path)


def test_another_training_is_refused_with_both_values():
    check_identity(state(), {"rank": "4"}, name="x")
    with pytest.raises(RequestError, match="rank was 4 and is 8 now; data was not recorded and is new now"):
        check_identity(state(), {"rank": "8", "data": "new"}, name="x")
