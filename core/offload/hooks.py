"""When buckets move: the middleware around each forward, and the end of each backward.

Order of a unit's forward: the saved-tensor hooks go on, its buckets are fetched, bound and pinned,
the forward runs, the hooks come off, the buckets are unpinned. What happens to a bucket then:

* forward outside a backward: its slot is free at once;
* recompute, that is a forward inside a running backward: it stays cached for the backward that
  follows;
* backward: a saved weight is fetched by its handle and stays cached;
* end of the backward, successful or not: everything cached goes.

Every module on the way from the root to a unit has the middleware too, with no bucket of its own: a
weight that is read from outside its module is pinned until the forward that reads it ends.

There are no full backward hooks: they turn inputs into views, which in-place blocks may not write to.
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..module_hooks import Forward, ModuleHook

if TYPE_CHECKING:
    from .buckets import Bucket
    from .engine import Engine

HOOK_NAME = "offload"


@dataclasses.dataclass(eq=False)
class Unit:
    """Buckets that one module's forward needs; the list grows if the module is given new tensors."""

    path: str
    buckets: list[Bucket] = dataclasses.field(default_factory=list)


class Scope:
    """What one running forward (or backward) has pinned."""

    def __init__(self) -> None:
        self.buckets: dict[int, Bucket] = {}
        self.has_pushed_hooks = False
        self.thread_id = threading.get_ident()


class UnitHook(ModuleHook):
    """Run a module's forward with its buckets on the target."""

    def __init__(self, engine: Engine, unit: Unit) -> None:
        self.engine = engine
        self.unit = unit

    def run(self, forward: Forward, module: nn.Module, args: tuple, kwargs: dict) -> Any:
        """Call the forward; its way out does not matter, an interrupt included."""
        if self.engine.is_covered(self.unit):
            return forward(*args, **kwargs)
        scope = self.engine.enter(self.unit)
        try:
            output = forward(*args, **kwargs)
            self.engine.keep_returned(output)
            return output
        finally:
            self.engine.leave(scope)


class TaskEnd:
    """Tell the engine that a backward is over.

    Autograd calls it after the last node. If the backward raises, autograd never calls it but lets
    go of it, which is then the signal.
    """

    def __init__(self, engine: Engine, task_id: int) -> None:
        self._engine = weakref.ref(engine)
        self._task_id = task_id
        self._is_done = False

    def __call__(self) -> None:
        """Report the end, once."""
        self._is_done = True
        engine = self._engine()
        if engine is not None:
            engine.end_task(self._task_id)

    def __del__(self) -> None:
        if not self._is_done:
            self()


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a forward's output: alone, or in tuples, lists, mappings and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name, None))
