"""Deal units (attention heads, feed-forward channels) out to the ranks of a tensor group."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..errors import PlanError, RequestError
from ..module_paths import find_modules, has_modules
from .mesh import input_name
from .plan import ModelPlan
from .sequence import split_sizes
from .tensor_plan import Unit

# Channels without units of their own are dealt out in runs as long as possible: matrix kernels are slower
# for odd sizes, and those for fp8 take multiples of 16 only.
_RUNS = (64, 32, 16, 8, 4, 2, 1)
_ALIGNMENT = 16
_MAX_UNEVENNESS = 1.25


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


class SharedUnits:
    """How every kind of unit of a model is dealt out.

    Args:
        model: The whole model, possibly on the meta device.
        plan: The plan of its class.
        degree: Ranks that share the weights.

    Attributes:
        fewest: Units of the kind that the model has fewest of: the most ranks that there can be.

    Raises:
        RequestError: If there are fewer units of some kind than ranks.
        PlanError: If the plan does not fit the model.
    """

    def __init__(self, model: nn.Module, plan: ModelPlan, degree: int) -> None:
        self._shares: dict[str, dict[str, UnitShares]] = {}
        self._counted: list[UnitShares] = []
        self.fewest = sys.maxsize
        assert plan.tensor is not None
        for unit in plan.tensor.units:
            if unit.optional and not has_modules(model, unit.scope):
                continue
            for scope, module in find_modules(model, unit.scope):
                shares = self._deal(plan, unit, module, degree)
                self._shares.setdefault(unit.name, {})[scope] = shares
                if unit.name == plan.tensor.units[0].name:
                    self._counted.append(shares)

    def at(self, name: str, path: str) -> UnitShares:
        """Return the shares that hold for the module at ``path``.

        Raises:
            PlanError: If the plan has no such unit there.
        """
        for scope, shares in self._shares.get(name, {}).items():
            if not scope or path == scope or path.startswith(f"{scope}."):
                return shares
        raise PlanError(f"the plan has no units {name!r} for {path}")

    def local_heads(self, num_heads: int, rank: int) -> int:
        """Return the rank's share of the model's fewest attention heads (units of the first name)."""
        return min(self._counted, key=lambda shares: sum(shares.counts)).share(num_heads, rank)

    def _deal(self, plan: ModelPlan, unit: Unit, module: nn.Module, degree: int) -> UnitShares:
        channels = _channels(module, unit)
        count = channels if unit.count is None else _attribute(module, unit.count)
        self.fewest = min(self.fewest, count)
        if degree > count:
            raise RequestError(
                f"{input_name('tp')}={degree} was asked for {plan.name}",
                limit=f"Tensor parallel gives each rank whole {unit.name}, and this model has {count}",
                way_out=f"Set {input_name('tp')} to a number from 1 to {count}",
            )
        if unit.count is None:
            return runs(channels, degree)
        width, rest = divmod(channels, count)
        if rest:
            raise PlanError(f"{channels} channels are not {count} whole {unit.name}")
        return UnitShares(width, split_sizes(count, degree))


def max_tensor_degree(model: nn.Module, plan: ModelPlan) -> int:
    """Return how many ranks can share the model's weights: its fewest units of any kind, 1 without a plan."""
    if plan.tensor is None:
        return 1
    return SharedUnits(model, plan, 1).fewest


def refuse_without_tensor_plan(plan: ModelPlan, degree: int) -> None:
    """Check that a model's plan says how its weights can be shared.

    Raises:
        RequestError: If not.
    """
    if plan.tensor is None:
        raise RequestError(
            f"{input_name('tp')}={degree} was asked for {plan.name}",
            limit="This model has no plan that says how its weights can be shared",
            way_out=f"Set {input_name('tp')} to 1",
        )


def _channels(module: nn.Module, unit: Unit) -> int:
    paths = (unit.channels,) if isinstance(unit.channels, str) else unit.channels
    return math.prod(_attribute(module, path) for path in paths)


def _attribute(module: nn.Module, path: str) -> int:
    value: Any = module
    for name in path.split("."):
        value = getattr(value, name, None)
    if not isinstance(value, int):
        raise PlanError(f"{path!r} is no number in {type(module).__name__}, which the plan counts units by")
    return value


def runs(channels: int, degree: int) -> UnitShares:
    """Return shares of channels that have no units of their own.

    Multiples of 16 if the whole is one and no rank has a quarter more than the mean by it, then equal shares,
    then long runs.
    """
    widths = [width for width in _RUNS if channels % width == 0 and channels // width >= degree]
    if _ALIGNMENT in widths:
        most = split_sizes(channels // _ALIGNMENT, degree)[0] * _ALIGNMENT
        if most * degree <= _MAX_UNEVENNESS * channels:
            widths = [width for width in widths if width >= _ALIGNMENT]
    even = [width for width in widths if channels // width % degree == 0]
    width = (even or widths or [1])[0]
    return UnitShares(width, split_sizes(channels // width, degree))
