"""The steps of attaching: check every tensor, take over from an earlier manager, make units and dicts.

What this module does not do: it keeps nothing; ``manager`` holds what was attached.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from ..errors import OffloadError, RequestError
from ..log import get_logger
from .budget import OffloadBudget
from .checks import check_tensors
from .config import OffloadConfig
from .hooks import Unit
from .modulation_layers import ModulationPlan
from .module_dicts import ManagedDict
from .pinning import HostPinning
from .planner import ResidencyPlan
from .shared_masters import SharedMasters
from .slots import rounded
from .tensors import Entry, ManagedTensor, make_managed
from .units import UnitPlan, module_bytes

if TYPE_CHECKING:
    from .engine import Engine
    from .manager import OffloadTrainingManager

_log = get_logger("offload")


# Weights kept between recompute and backward: room for two of the largest units, or this share.
_CACHE_SHARE = 32


_Options = tuple[
    OffloadBudget | None,
    ModulationPlan | None,
    ResidencyPlan | None,
    HostPinning | None,
    SharedMasters | None,
]


def _check_options(model: nn.Module, options: _Options) -> None:
    for option, (name, kind, example) in zip(
        options,
        (
            ("budget", OffloadBudget, "OffloadBudget(vram_gb=12)"),
            ("modulation", ModulationPlan, "a ModulationPlan"),
            ("plan", ResidencyPlan, "the residency_plan of an earlier manager"),
            ("pinning", HostPinning, "HostPinning()"),
            ("shared_masters", SharedMasters, "SharedMasters.create()"),
        ),
        strict=True,
    ):
        if option is not None and not isinstance(option, kind):
            raise RequestError(
                f"{name}={option!r} was asked for offloading",
                limit=f"Only {kind.__name__} and None are taken there",
                way_out=f"Pass {example}, or leave it out",
            )
    budget = options[0]
    if budget is not None:
        budget.check_host(module_bytes(model))


def check_request(model: nn.Module, config: OffloadConfig, options: _Options) -> None:
    """Check the options and every tensor before anything changes, an earlier manager included.

    Raises:
        RequestError: If one is of another kind, does not fit or cannot be managed.
    """
    _check_options(model, options)
    entries: dict[int, tuple[torch.Tensor, list[Entry]]] = {}
    for path, module in model.named_modules():
        for tensors, is_parameter in ((module._parameters, True), (module._buffers, False)):
            for name, tensor in dict.items(tensors):
                if tensor is not None:
                    full_name = f"{path}.{name}" if path else name
                    entry = Entry(module, tensors, name, full_name, is_parameter)
                    entries.setdefault(id(tensor), (tensor, []))[1].append(entry)
    check_tensors((ManagedTensor(tensor, places) for tensor, places in entries.values()), config)


def take_over(model: nn.Module, new: OffloadTrainingManager) -> None:
    """Remove an earlier manager of the same model, which then hands its calls to ``new``.

    Raises:
        OffloadError: If a manager of another model has a part of this one.
    """
    holders = (module.__dict__.get("_parameters") for module in model.modules())
    engines = {id(holder.engine): holder.engine for holder in holders if isinstance(holder, ManagedDict)}
    olds = [engine.manager for engine in engines.values()]
    for old in olds:
        root = None if old._model_ref is None else old._model_ref()
        if root is not model:
            raise OffloadError(
                f"Offloading was asked for {type(model).__name__}, part of which is already managed by the "
                f"OffloadTrainingManager of {type(root).__name__}. Remove that one first."
            )
    for old in olds:
        old.remove()
        old._successor = new
        _log.info("a second OffloadTrainingManager on %s replaces the first", type(model).__name__)


def make_units(model: nn.Module, plans: list[UnitPlan]) -> dict[int, Unit]:
    """Return ``id(module)`` to the unit that the module's forward needs."""
    units = {id(module): Unit(path) for path, module in model.named_modules()}
    for plan in plans:
        unit = units[id(plan.module)]
        for module in (*(owner for _, owner in plan.owners), *plan.members):
            units[id(module)] = unit
    return units


def make_dicts(model: nn.Module, engine: Engine) -> list[ManagedDict]:
    """Return the dicts that are to stand for every module's parameters and buffers."""
    holders = []
    for path, module in model.named_modules():
        for tensors, is_parameters in ((module._parameters, True), (module._buffers, False)):
            holders.append(ManagedDict(tensors, engine, module, path=path, is_parameters=is_parameters))
    return holders


def collect(holders: list[ManagedDict]) -> list[ManagedTensor]:
    """Return one managed tensor for each distinct tensor in the dicts."""
    entries: dict[int, tuple[torch.Tensor, list[Entry]]] = {}
    for holder in holders:
        for name, tensor in dict.items(holder):
            if tensor is not None:
                entry = Entry(holder.module, holder, name, holder.full_name(name), holder.is_parameters)
                entries.setdefault(id(tensor), (tensor, []))[1].append(entry)
    return [make_managed(tensor, places) for tensor, places in entries.values()]


def set_dict(module: nn.Module, tensors: dict, *, is_parameters: bool) -> None:
    """Make ``tensors`` the module's parameters or buffers."""
    # Not setattr: nn.Module would look at the value.
    module.__dict__["_parameters" if is_parameters else "_buffers"] = tensors


def set_limits(engine: Engine) -> None:
    """Give a filled engine the room for what it streams, and count what is resident."""
    largest = max((bucket.nbytes for bucket in engine.store.buckets), default=0)
    limit = engine.config.recompute_cache_bytes
    if limit is None:
        limit = max(2 * rounded(largest), engine.store.streamed_bytes // _CACHE_SHARE)
    engine.residency.cache_limit_bytes = limit
    engine.residency.resident_set_bytes = engine.store.residents.nbytes
    engine.residency.note_peak()
