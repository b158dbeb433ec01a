"""Deal units (attention heads, feed-forward channels) out to the ranks of a tensor group."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..errors import PlanError, RequestError
from .mesh import input_name
from .plan import ModelPlan
from .sequence import split_sizes
from .tensor_plan import TensorPlan, Unit

# Channels without units of their own are dealt out in runs as long as possible: matrix kernels are slower
# for odd sizes.
_RUNS = (64, 32, 16, 8, 4, 2, 1)


@dataclass(frozen=True)
class UnitShares:
    """How one kind of unit is dealt out.

    Args:
        width: Channels of one unit.
        counts: Units of each rank.
    """

    width: int
    counts: tuple[int, ...]

    @property
    def total_channels(self) -> int:
        """Channels of all units together."""
        return sum(self.counts) * self.width

    def channels(self, rank: int) -> tuple[int, int]:
        """Return first and one past last channel of a rank."""
        first = sum(self.counts[:rank]) * self.width
        return first, first + self.counts[rank] * self.width

    def share(self, value: int, rank: int) -> int:
        """Return the rank's share of a number that counts units or channels of them.

        Raises:
            PlanError: If it counts something else.
        """
        share, rest = divmod(value * self.counts[rank], sum(self.counts))
        if rest:
            raise PlanError(f"{value} cannot be shared like {sum(self.counts)} units")
        return share


def check_tensor_degree(model: nn.Module, plan: ModelPlan, degree: int) -> None:
    """Check that the model's weights can be shared by ``degree`` ranks.

    Raises:
        RequestError: If not; every rank needs at least one unit of each kind.
        PlanError: If the plan does not fit the model.
    """
    asked = f"{input_name('tp')}={degree} was asked for {plan.name}"
    if plan.tensor is None:
        raise RequestError(
            asked,
            limit="This model has no plan that says how its weights can be shared",
            way_out=f"Set {input_name('tp')} to 1",
        )
    for unit, count in _unit_counts(model, plan.tensor):
        if degree > count:
            raise RequestError(
                asked,
                limit=f"Tensor parallel gives each rank whole {unit.name}, and this model has {count}",
                way_out=f"Set {input_name('tp')} to a number from 1 to {count}",
            )


def unit_shares(model: nn.Module, plan: TensorPlan, degree: int) -> dict[str, UnitShares]:
    """Return how each kind of unit is dealt out to ``degree`` ranks, by name."""
    shares = {}
    counts = {unit.name: count for unit, count in _unit_counts(model, plan)}
    for unit in plan.units:
        if unit.name not in counts:
            continue
        channels = _channels(model, unit)
        assert channels is not None
        if unit.count is None:
            shares[unit.name] = runs(channels, degree)
            continue
        width, rest = divmod(channels, counts[unit.name])
        if rest:
            raise PlanError(f"{channels} channels are not {counts[unit.name]} whole {unit.name}")
        shares[unit.name] = UnitShares(width, split_sizes(counts[unit.name], degree))
    return shares


def _unit_counts(model: nn.Module, plan: TensorPlan) -> Iterable[tuple[Unit, int]]:
    for unit in plan.units:
        channels = _channels(model, unit)
        if channels is None:
            if unit.optional:
                continue
            raise PlanError(f"{unit.channels!r} is no number of channels of {unit.name}")
        if unit.count is None:
            yield unit, channels
            continue
        count = _attribute(model, unit.count)
        if count is None:
            raise PlanError(f"{unit.count!r} is no number of {unit.name} in {type(model).__name__}")
        yield unit, count


def _channels(model: nn.Module, unit: Unit) -> int | None:
    paths = (unit.channels,) if isinstance(unit.channels, str) else unit.channels
    factors = [_attribute(model, path) for path in paths]
    known = [factor for factor in factors if factor is not None]
    return math.prod(known) if len(known) == len(factors) else None


def _attribute(model: nn.Module, path: str) -> int | None:
    value: Any = model
    for name in path.split("."):
        value = getattr(value, name, None)
    return value if isinstance(value, int) else None


def runs(channels: int, degree: int) -> UnitShares:
    """Return shares of channels that have no units of their own: long runs, equal shares if any go."""
    widths = [width for width in _RUNS if channels % width == 0 and channels // width >= degree]
    even = [width for width in widths if channels // width % degree == 0]
    width = (even or widths or [1])[0]
    return UnitShares(width, split_sizes(channels // width, degree))
