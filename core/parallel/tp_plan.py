"""Read a ``_tp_plan`` dictionary of diffusers, as it is, as a tensor plan of this package.

Such a dictionary names Linear layers and says "colwise", "rowwise", or gives an object that cuts a fused
layer by blocks. It knows no attention heads; here layers as wide as an attention are cut by its heads, so
heads need not divide by the ranks. What the dictionary leaves out stays whole.

The model must reshape by head dim, not by its number of heads, as diffusers' models with such a dictionary
do.

Source of the dictionary's meaning: diffusers ``hooks/tensor_parallel.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from ..errors import PlanError
from ..module_paths import find_modules
from .plan import ModelPlan, ParallelMethod
from .tensor_plan import ColumnParallel, RowParallel, TensorPlan, Unit

# Whether output channels are cut.
_STYLES = {"colwise": True, "PackedColwiseParallel": True, "rowwise": False, "PackedRowwiseParallel": False}


def read_tp_plan(model: nn.Module, tp_plan: Mapping[str, Any] | None = None) -> ModelPlan:
    """Return the plan for ``parallelize(model, plan, tensor_group=...)``; only names and sizes are read.

    Args:
        model: The model, possibly on the meta device.
        tp_plan: Module path -> ``"colwise"``, ``"rowwise"``, or an object of a class named
            ``PackedColwiseParallel`` or ``PackedRowwiseParallel`` with ``blocks``. None is the model's own
            ``_tp_plan``.

    Raises:
        PlanError: If the model has no such dictionary, or it does not fit the model.
    """
    dictionary = getattr(model, "_tp_plan", None) if tp_plan is None else tp_plan
    name = type(model).__name__
    if not dictionary:
        raise PlanError(f"{name} has no _tp_plan; give one as tp_plan")
    heads = dict(_head_units(model))
    units: dict[int, Unit] = {}
    fused: dict[int, int] = {}
    rules = []
    for path, style in dictionary.items():
        full_path, linear = find_modules(model, path)[0]
        columns, sizes = _cut_of(full_path, linear, style)
        attribute = "out_features" if columns else "in_features"
        for size in sizes:
            # A part of a fused layer has no attribute of its own; another layer of that width has.
            known = f"{full_path}.{attribute}" if len(sizes) == 1 else None
            if size not in units or not units[size].channels:
                units[size] = heads.get(size) or Unit(f"width {size}", channels=known or ())
        if columns:
            fused |= {size: width for width in sizes if width in heads for size in sizes if size not in heads}
        parts = tuple(units[size].name for size in sizes)
        rules.append(ColumnParallel(path, parts=parts) if columns else RowParallel(path, parts=parts))
    for size, width in fused.items():
        units[size] = _dealt_like(units[size], size, heads[width], model)
    unknown = [unit.name for unit in units.values() if not unit.channels]
    if unknown:
        raise PlanError(f"the _tp_plan of {name} cuts a part of {unknown}, and no whole layer of that width")
    counted = [unit.count for unit in units.values() if unit.count is not None]
    if not counted:
        raise PlanError(f"the _tp_plan of {name} cuts no layer as wide as an attention of the model")
    return ModelPlan(
        name=name,
        class_path=f"{type(model).__module__}.{type(model).__qualname__}",
        heads=counted[0],
        rules=(),
        methods=frozenset({ParallelMethod.TENSOR}),
        # Attention first: its units are the model's heads.
        tensor=TensorPlan(
            units=tuple(sorted(units.values(), key=lambda unit: unit not in heads.values())),
            rules=tuple(rules),
        ),
    )


def _head_units(model: nn.Module) -> Iterable[tuple[int, Unit]]:
    """Give the units of every attention in the model, by its width."""
    for path, module in model.named_modules():
        width, heads = getattr(module, "inner_dim", None), getattr(module, "heads", None)
        if path and isinstance(width, int) and isinstance(heads, int):
            yield width, Unit(f"heads of {width}", channels=f"{path}.inner_dim", count=f"{path}.heads")


def _dealt_like(unit: Unit, size: int, heads: Unit, model: nn.Module) -> Unit:
    """Return the unit, dealt out in the proportion of the heads that are fused with it in one layer.

    A model finds its parts in that layer's output by their proportion, which uneven heads would change.

    Raises:
        PlanError: If no heads' worth of it is a whole number of channels.
    """
    assert heads.count is not None
    path, _, attribute = heads.count.rpartition(".")
    count = getattr(model.get_submodule(path), attribute)
    if size % count:
        raise PlanError(
            f"the _tp_plan of {type(model).__name__} fuses {size} channels with {count} heads in one layer; "
            "they cannot be dealt out in one proportion"
        )
    return replace(unit, count=heads.count)


def _cut_of(path: str, module: nn.Module, style: Any) -> tuple[bool, list[int]]:
    """Return whether a layer is cut by output channels, and the sizes of the parts it is cut in.

    Raises:
        PlanError: If it is no Linear, the style is unknown, or blocks do not fit.
    """
    if not isinstance(module, nn.Linear):
        raise PlanError(f"the _tp_plan names {path}, which is a {type(module).__name__} and no Linear")
    kind = style if isinstance(style, str) else type(style).__name__
    if kind not in _STYLES:
        raise PlanError(f"the _tp_plan says {style!r} for {path}; known are {', '.join(_STYLES)}")
    columns = _STYLES[kind]
    total = module.out_features if columns else module.in_features
    if isinstance(style, str):
        return columns, [total]
    blocks = style.blocks or getattr(module, f"_tp_packed_{'col' if columns else 'row'}_blocks", None)
    if not blocks or total % sum(blocks):
        raise PlanError(f"the _tp_plan cuts the {total} channels of {path} by blocks {blocks}")
    return columns, [total // sum(blocks) * block for block in blocks]
