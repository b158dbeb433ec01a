"""Inputs that a model takes only where each rank computes a whole sequence."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from ..errors import RequestError
from .conditions import applies

if TYPE_CHECKING:
    from .plan import ModelPlan


@dataclass(frozen=True)
class RefusedInput:
    """An argument of the whole model that is not covered while ranks share a sequence.

    Args:
        argument: Its name; a conditioning holds it under the same name.
        limit: Why.
        having: As in ``ModuleRule``, of the model.
        lacking: Likewise.
    """

    argument: str
    limit: str
    having: str = ""
    lacking: str = ""


def refuse_inputs(plan: ModelPlan, model: nn.Module, names: Collection[str]) -> None:
    """Check the inputs of a model that shares a sequence among ranks.

    Args:
        plan: Its plan.
        model: The model, possibly on the meta device.
        names: Arguments that are given, by name.

    Raises:
        RequestError: If the plan does not cover one.
    """
    for refused in plan.refused:
        if refused.argument in names and applies(refused, model, model):
            raise RequestError(
                f"{refused.argument} was given to {plan.name}, whose sequence is shared among GPUs",
                limit=refused.limit,
                way_out="Set ulysses_degree and ring_degree to 1 (CFG, batch and tensor parallel take it), "
                "or remove the node that adds it",
            )
