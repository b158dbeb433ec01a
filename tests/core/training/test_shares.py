"""Sharing a step's micro-steps out among devices; the processes are tested with the adapter."""

from __future__ import annotations

import pytest
import torch
from comfyui_ferry.core.errors import RequestError, TrainingError
from comfyui_ferry.core.training.shares import add_gradients, check_first_losses, check_shares, share_out
from torch import nn


@pytest.mark.parametrize(("accumulation", "devices"), [(1, 1), (6, 3), (8, 8)])
def test_every_micro_step_has_one_device(accumulation, devices):
    check_shares(accumulation, num_devices=devices)
    shares = share_out(3 * accumulation, accumulation, num_devices=devices)
    assert len({len(share) for share in shares}) == 1
    numbers = [number for share in shares for number in share]
    assert numbers == list(range(3 * accumulation, 4 * accumulation))


@pytest.mark.parametrize(
    ("accumulation", "devices", "way_out"), [(1, 2, "to 2 or"), (5, 4, "to 8 or"), (4, 0, "1 or more")]
)
def test_what_cannot_be_shared_evenly_is_refused(accumulation, devices, way_out):
    with pytest.raises(RequestError, match=way_out):
        check_shares(accumulation, num_devices=devices)


def test_gradients_are_added_and_absent_ones_stay_absent():
    parameters = {name: nn.Parameter(torch.zeros(2)) for name in ("both", "theirs", "mine", "none")}
    parameters["both"].grad, parameters["mine"].grad = torch.ones(2), torch.ones(2)
    add_gradients(parameters, {"both": torch.full((2,), 2.0), "theirs": torch.full((2,), 3.0)})
    found = {name: None if p.grad is None else p.grad.tolist() for name, p in parameters.items()}
    assert found == {"both": [3.0, 3.0], "theirs": [3.0, 3.0], "mine": [1.0, 1.0], "none": None}


@pytest.mark.parametrize("there", [1.1, float("nan"), 0.0])
def test_a_helper_that_computes_something_else_is_named(there):
    check_first_losses([1.0, 2.0], [[1.001], [2.0, 9.0]])
    check_first_losses([], [[5.0]])
    with pytest.raises(TrainingError, match="GPU 3"):
        check_first_losses([1.0, 1.0], [[1.0], [there]])
