"""Work a tensor plan out for one model: which part of every parameter each rank holds.

Only names, shapes and attributes are read, so the model may be on the meta device, and the result can
cut a checkpoint before anything reaches a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from ..errors import PlanError
from ..module_paths import find_modules, has_modules
from .conditions import applies
from .plan import ModelPlan
from .tensor_plan import (
    ColumnParallel,
    EmbeddingColumn,
    GatheredColumn,
    LocalArgument,
    LocalAttribute,
    NormAcrossRanks,
    RowParallel,
    TensorRule,
)
from .tensor_units import SharedUnits, UnitShares, refuse_without_tensor_plan, runs


@dataclass(frozen=True)
class TensorPart:
    """The part of one parameter that a rank holds.

    Args:
        dim: Dim that is cut.
        size: Its whole length.
        ranges: First and one past last row of each run that the rank holds, in order; none at all if it
            does not hold the parameter (a bias that another rank adds).
    """

    dim: int
    size: int
    ranges: tuple[tuple[int, int], ...]

    @property
    def local_size(self) -> int:
        """Rows of this rank."""
        return sum(stop - start for start, stop in self.ranges)

    def take(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return this rank's part of the whole parameter; a view where it is one run, else a copy.

        Raises:
            PlanError: If the tensor is not the whole parameter.
        """
        pieces = self.pieces(tensor)
        return join_pieces(pieces, self.dim) if pieces else None

    def pieces(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the runs of the whole parameter that the rank holds, views; none if it holds nothing.

        Raises:
            PlanError: If the tensor is not the whole parameter.
        """
        if tensor.shape[self.dim] != self.size:
            raise PlanError(
                f"a weight of {tuple(tensor.shape)} should have {self.size} rows in dim {self.dim}"
            )
        return [tensor.narrow(self.dim, start, stop - start) for start, stop in self.ranges]


def join_pieces(pieces: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """Return pieces as one tensor, a single one as it is."""
    return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces), dim)


@dataclass
class ShardedModule:
    """All that a tensor plan does at one module.

    Args:
        path: Full path, for messages.
        module: The module.
        rule: The rule that cuts its weights, or None.
        attributes: New values of its attributes on this rank.
        arguments: Arguments that are cut, with first and one past last unit.
    """

    path: str
    module: nn.Module
    rule: TensorRule | None = None
    attributes: dict[str, Any] = field(default_factory=dict)
    arguments: list[tuple[LocalArgument, UnitShares]] = field(default_factory=list)


class TensorShards:
    """One rank's part of a model's weights, by the model's plan.

    Args:
        model: The whole model, possibly on the meta device; it is not changed.
        plan: The plan of its class.
        degree: Ranks that share the weights.
        rank: This rank among them.

    Raises:
        RequestError: If the plan has no tensor parallelism, or there are fewer units than ranks.
        PlanError: If the plan does not fit the model.
    """

    def __init__(self, model: nn.Module, plan: ModelPlan, *, degree: int, rank: int) -> None:
        refuse_without_tensor_plan(plan, degree)
        assert plan.tensor is not None
        self.degree = degree
        self.rank = rank
        self.units = SharedUnits(model, plan, degree)
        self.parts: dict[str, TensorPart] = {}
        self.modules: dict[str, ShardedModule] = {}
        for rule in plan.tensor.rules:
            if rule.optional and not has_modules(model, rule.path):
                continue
            for path, module in find_modules(model, rule.path):
                if applies(rule, module, model):
                    self._add(rule, self.modules.setdefault(path, ShardedModule(path, module)))

    def take(self, name: str, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return this rank's part of a parameter or buffer, given whole; None if it holds none of it.

        Args:
            name: Full name in the model.
            tensor: The whole tensor, on any device.

        Returns:
            The tensor itself if every rank holds it whole, a view of it, or a copy.

        Raises:
            PlanError: If its shape is not that of the model.
        """
        part = self.parts.get(name)
        if part is None:
            return tensor
        try:
            return part.take(tensor)
        except PlanError as error:
            raise PlanError(f"{name}: {error}") from None

    def _add(self, rule: TensorRule, entry: ShardedModule) -> None:
        if isinstance(rule, LocalAttribute):
            value = getattr(entry.module, rule.name, None)
            if not isinstance(value, int):
                raise PlanError(f"{entry.path}.{rule.name} is {value!r}, which is no count of {rule.unit}")
            entry.attributes[rule.name] = self.units.at(rule.unit, entry.path).share(value, self.rank)
            return
        if isinstance(rule, LocalArgument):
            entry.arguments.append((rule, self.units.at(rule.unit, entry.path)))
            return
        if entry.rule is not None:
            raise PlanError(f"the plan cuts the weights of {entry.path} twice")
        entry.rule = rule
        _check_parameters(entry)
        if isinstance(rule, GatheredColumn):
            self._cut(entry, rule, runs(_weight(entry).shape[_weight_dim(entry)], self.degree))
        else:
            assert isinstance(rule, ColumnParallel | RowParallel | EmbeddingColumn | NormAcrossRanks)
            self._cut(entry, rule, *(self.units.at(name, entry.path) for name in rule.parts))

    def _cut(self, entry: ShardedModule, rule: TensorRule, *shares: UnitShares) -> None:
        """Note the part of every parameter of a module, and the sizes that it has as attributes."""
        weight_dim = _weight_dim(entry)
        size = _weight(entry).shape[weight_dim]
        expected = sum(share.total_channels for share in shares)
        if size != expected:
            raise PlanError(
                f"{entry.path} has {size} channels, but its parts in the plan have {expected} together"
            )
        weight_part = TensorPart(weight_dim, size, _joined_ranges(shares, self.rank))
        self.parts[f"{entry.path}.weight"] = weight_part
        if getattr(entry.module, "bias", None) is not None:
            if not isinstance(rule, RowParallel):
                self.parts[f"{entry.path}.bias"] = TensorPart(0, size, weight_part.ranges)
            elif self.rank > 0:
                self.parts[f"{entry.path}.bias"] = TensorPart(0, _weight(entry).shape[0], ())
        sizes = _size_attributes(entry, weight_part.local_size)
        entry.attributes |= {name: size for name, size in sizes.items() if hasattr(entry.module, name)}


def largest_rank_bytes(model: nn.Module, plan: ModelPlan, degree: int) -> int:
    """Return the bytes of weights that the fullest of ``degree`` ranks holds."""
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    if degree == 1:
        return sum(tensor.nbytes for tensor in tensors.values())
    by_rank = [TensorShards(model, plan, degree=degree, rank=rank) for rank in range(degree)]
    return max(
        sum(_local_bytes(shards, name, tensor) for name, tensor in tensors.items()) for shards in by_rank
    )


def _local_bytes(shards: TensorShards, name: str, tensor: torch.Tensor) -> int:
    part = shards.parts.get(name)
    return tensor.nbytes if part is None else tensor.nbytes // max(1, part.size) * part.local_size


def _joined_ranges(shares: Sequence[UnitShares], rank: int) -> tuple[tuple[int, int], ...]:
    ranges: list[tuple[int, int]] = []
    offsets = accumulate((share.total_channels for share in shares), initial=0)
    for share, offset in zip(shares, offsets, strict=False):
        start, stop = (offset + channel for channel in share.channels(rank))
        if ranges and ranges[-1][1] == start:
            start = ranges.pop()[0]
        ranges.append((start, stop))
    return tuple(ranges)


def _weight(entry: ShardedModule) -> torch.Tensor:
    weight = getattr(entry.module, "weight", None)
    if not isinstance(weight, torch.Tensor):
        raise PlanError(f"{entry.path} ({type(entry.module).__name__}) has no weight to cut")
    return weight


def _check_parameters(entry: ShardedModule) -> None:
    """Check that the module holds a weight, a bias and single numbers; scales of parts would need a cut."""
    held = dict(entry.module.named_parameters()) | dict(entry.module.named_buffers())
    unknown = sorted(name for name, tensor in held.items() if tensor.numel() > 1)
    unknown = [name for name in unknown if name not in ("weight", "bias")]
    if unknown:
        raise PlanError(f"{entry.path} holds {unknown} besides its weight, which no rule cuts")


def _weight_dim(entry: ShardedModule) -> int:
    """Return which dim of the weight is cut: of a Linear the outputs, except for a row-parallel one."""
    return int(isinstance(entry.rule, RowParallel) or isinstance(entry.module, nn.Embedding))


def _size_attributes(entry: ShardedModule, size: int) -> dict[str, Any]:
    rule = entry.rule
    if isinstance(rule, RowParallel):
        return {"in_features": size}
    if isinstance(entry.module, nn.Embedding):
        return {"embedding_dim": size}
    if isinstance(rule, NormAcrossRanks):
        return {"normalized_shape": (size,)}
    return {"out_features": size}
