"""The promise of the engine: the same numbers as the plain model, and nothing left on the target."""

from __future__ import annotations

import pytest
from comfyui_ferry.core.offload import OffloadTrainingManager
from ferry_support.offload_cases import CASES, assert_same_run, build, train

# In MB: whole blocks of the cases (some kilobytes) move at once with the larger one.
THRESHOLDS = {"leaf": None, "small": 0.002, "whole": 1.0}


@pytest.mark.parametrize("checkpointing", ["none", "reentrant", "non_reentrant"])
@pytest.mark.parametrize("optimizer_on_host", [False, True], ids=["resident", "host"])
@pytest.mark.parametrize("threshold", THRESHOLDS)
@pytest.mark.parametrize("name", CASES)
def test_training_equals_the_plain_model(name, threshold, optimizer_on_host, checkpointing):
    optimizer = "SGD" if checkpointing == "none" else "AdamW"
    expected = train(build(name, checkpointing), optimizer=optimizer)
    model = build(name, checkpointing)
    manager = OffloadTrainingManager(model, "cpu", optimizer_on_host, THRESHOLDS[threshold])

    def nothing_leaked():
        assert manager.resident_bytes == manager.resident_set_bytes

    actual = train(model, manager, optimizer=optimizer, after_each_backward=nothing_leaked)
    assert_same_run(actual, expected)
