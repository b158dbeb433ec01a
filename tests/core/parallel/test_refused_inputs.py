"""Inputs that a plan does not cover, before anything is computed."""

from __future__ import annotations

import pytest
from comfyui_ferry.core.errors import RequestError
from comfyui_ferry.core.parallel import ModelPlan, refuse_inputs
from comfyui_ferry.core.parallel.refused_inputs import RefusedInput
from torch import nn

PLAN = ModelPlan(
    "Toy",
    "toy.Toy",
    heads="heads",
    rules=(),
    methods=frozenset(),
    refused=(RefusedInput("picture", "No room"), RefusedInput("frame", "No time", having="tails.0")),
)


class Toy(nn.Module):
    def __init__(self, num_tails: int) -> None:
        super().__init__()
        self.tails = nn.ModuleList(nn.Identity() for _ in range(num_tails))


def test_what_is_not_given_or_does_not_apply_is_taken() -> None:
    refuse_inputs(PLAN, Toy(1), {"text"})
    refuse_inputs(PLAN, Toy(0), {"text", "frame"})


@pytest.mark.parametrize(("name", "limit"), [("picture", "No room"), ("frame", "No time")])
def test_what_is_given_is_refused_with_its_limit_and_the_way_out(name: str, limit: str) -> None:
    with pytest.raises(RequestError, match=f"{name} was given to Toy.*{limit}.*Set ulysses_degree"):
        refuse_inputs(PLAN, Toy(1), {name})
