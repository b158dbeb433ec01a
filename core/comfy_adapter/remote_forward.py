"""Replace a diffusion model's innermost forward by a call into the worker group.

It is set on the *instance*, through ComfyUI's injections, so every wrapper that other nodes add
(EasyCache, context windows, APPLY_MODEL and DIFFUSION_MODEL wrappers) still runs here, in ComfyUI's
process, and the model object, its keys and its shapes stay what they were.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from ..errors import RequestError
from .model_export import innermost_forward
from .nested import map_tensors

if TYPE_CHECKING:
    from .parallel_run import ParallelRun

# What ComfyUI puts into transformer_options for code that runs on this side of the call.
_LOCAL_OPTIONS = frozenset(
    {"wrappers", "callbacks", "uuids", "easycache", "context_window", "multigpu_thread_device"}
)
_PATCH_OPTIONS = ("patches", "patches_replace", "optimized_attention_override")


class RemoteForward:
    """Callable stored under the innermost forward's name in ``diffusion_model.__dict__``."""

    def __init__(self, module: nn.Module, run: ParallelRun) -> None:
        self.run = run
        self.signature = inspect.signature(getattr(type(module), innermost_forward(module)))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate the call on the workers; same arguments and result as the method it replaces."""
        bound = self.signature.bind(None, *args, **kwargs)
        arguments = _flatten(bound)
        options = arguments.get("transformer_options") or {}
        arguments["transformer_options"] = sendable_options(options)
        x = arguments["x"]
        device = (x[0] if isinstance(x, list) else x).device  # video with audio is a list of latents
        output = self.run.forward(arguments)
        return map_tensors(output, lambda tensor: tensor.to(device))


class RemoteInjection:
    """Inject and eject a ``RemoteForward`` for one patcher, safely among clones.

    ComfyUI copies the "is injected" flag on clone and ejects when a clone is garbage-collected, so a
    dead clone would switch off the one in use. Hence only the patcher that injected may eject.
    """

    def __init__(self, run: ParallelRun) -> None:
        self.run = run
        self._owner: Callable[[], Any] = lambda: None

    def inject(self, patcher: Any) -> None:
        """Set the instance's innermost forward."""
        module = patcher.model.diffusion_model
        module.__dict__[innermost_forward(module)] = RemoteForward(module, self.run)
        self._owner = weakref.ref(patcher)

    def eject(self, patcher: Any) -> None:
        """Take it away again, if ``patcher`` is the one that set it."""
        module = patcher.model.diffusion_model
        name = innermost_forward(module)
        current = module.__dict__.get(name)
        if (
            isinstance(current, RemoteForward)
            and current.run is self.run
            and self._owner() in (None, patcher)
        ):
            del module.__dict__[name]


def sendable_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return the part of ``transformer_options`` that the workers' forward reads.

    Raises:
        RequestError: If an option would change the computation inside the blocks and cannot be sent.
    """
    for name in _PATCH_OPTIONS:
        if options.get(name):
            raise RequestError(
                f"a node on this model uses {name} ({_describe(options[name])})",
                limit="Workers run in their own processes and cannot call functions of this one",
                way_out="Remove that node before the parallel node, or sample with a stock KSampler",
            )
    skipped = {*_LOCAL_OPTIONS, *_PATCH_OPTIONS}
    return {name: value for name, value in options.items() if name not in skipped}


def _describe(value: Any) -> str:
    return ", ".join(sorted(map(str, value))) if isinstance(value, dict) else type(value).__name__


def _flatten(bound: inspect.BoundArguments) -> dict[str, Any]:
    """Return the call as keyword arguments, with the model's ``**kwargs`` merged in."""
    arguments: dict[str, Any] = {}
    for name, value in list(bound.arguments.items())[1:]:
        if bound.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            arguments.update(value)
        else:
            arguments[name] = value
    return arguments
