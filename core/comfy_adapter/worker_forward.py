"""How a worker evaluates its model: as it is, compiled, or recorded as a CUDA graph; and its attention."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import comfy.ldm.modules.attention
import torch
from torch import nn

from ..parallel import CompiledBlocks, ModelPlan, ParallelHandle, RecordedForward, with_cudnn
from .acceleration import Acceleration
from .model_export import innermost_forward


class WorkerForward:
    """Calls a model's innermost forward; all ranks of its groups must call together.

    Args:
        module: The rank's model.
        plan: Its plan.
        handle: How it is shared, or None if this rank computes all of it.
        device: Where it computes.
    """

    def __init__(
        self, module: nn.Module, plan: ModelPlan, handle: ParallelHandle | None, *, device: torch.device
    ) -> None:
        self._device = device
        self._module = module
        self._plan = plan
        self._handle = handle
        self._acceleration = Acceleration.NONE
        self._compiled: CompiledBlocks | None = None
        self._recorded: RecordedForward | None = None
        self._call = self._build()

    def set_acceleration(self, acceleration: Acceleration) -> None:
        """Evaluate in this way from the next call on."""
        if acceleration is self._acceleration:
            return
        self._acceleration = acceleration
        if self._compiled is not None:
            self._compiled.remove()
            self._compiled = None
        if acceleration.compiles:
            self._compiled = CompiledBlocks(self._module, self._plan)
        self._call = self._build()

    def model_changed(self) -> None:
        """Forget what was recorded: a weight lies elsewhere, or a layer computes in another way."""
        if self._recorded is not None:
            self._recorded.clear()

    def __call__(self, arguments: dict[str, Any]) -> Any:
        """Return the output for ``arguments`` (tensors on the rank's device), valid until the next call."""
        with torch.inference_mode():
            return self._call(arguments)

    def plainly(self, arguments: dict[str, Any]) -> Any:
        """Return the output for ``arguments``, neither recorded nor compiled."""
        return self._evaluate(arguments)

    def _build(self) -> Callable[[dict[str, Any]], Any]:
        # Without a reference to this object: recordings must go with the last reference to the model, since
        # a process group cannot be ended while a recording of its collectives exists.
        override = None if self._handle is None else self._handle.attention_override
        if self._device.type == "cuda":
            override = with_cudnn(override, plain_attention())
        if override is not None and self._compiled is not None:
            override = self._compiled.attention_override(override)
        evaluate = functools.partial(_evaluate, self._module, self._handle, override)
        self._evaluate = evaluate
        required = self._acceleration is not Acceleration.AUTO
        self._recorded = None
        if self._acceleration.records:
            agree = (
                None if self._handle is None else functools.partial(self._handle.agree, device=self._device)
            )
            name = type(self._module).__name__
            self._recorded = RecordedForward(evaluate, name=name, required=required, agree=agree)
        return evaluate if self._recorded is None else self._recorded


def _evaluate(
    module: nn.Module, handle: ParallelHandle | None, override: Any, arguments: Mapping[str, Any]
) -> Any:
    forward: Any = getattr(module, innermost_forward(module))
    if override is not None:
        options = {**arguments["transformer_options"], "optimized_attention_override": override}
        arguments = {**arguments, "transformer_options": options}
    return forward(**arguments) if handle is None else handle.run(forward, **arguments)


@functools.cache
def plain_attention() -> frozenset[Callable[..., torch.Tensor]]:
    """Return ComfyUI's attention by PyTorch, as its overrides are called with it."""
    function: Any = comfy.ldm.modules.attention.attention_pytorch
    return frozenset({function, getattr(function, "__wrapped__", function)})
