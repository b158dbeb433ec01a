"""The tester of tensor parallelism: ranks with a part of the weights give what the whole model gives."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from comfyui_ferry.core.module_hooks import hook_names
from comfyui_ferry.core.parallel import ModelPlan, ParallelDims, build_mesh, parallelize
from torch import nn

from .parity import relative_error, run_alone, run_parallel
from .tiny_models import Inputs


def tensor_errors(
    model: nn.Module, plan: ModelPlan, inputs: Inputs, reference: torch.Tensor, dims: ParallelDims
) -> dict[str, Any]:
    """Run one rank and return what it saw; collective over all ranks.

    The forward runs twice, and once more alone after ``remove()``.
    """
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    attributes = plain_attributes(model)
    layout = build_mesh(dims)
    handle = parallelize(model, plan, group=layout.sequence_group, tensor_group=layout.tensor_group)
    outputs = [run_parallel(model, handle, inputs) for _ in range(2)]
    held = weight_bytes(model)
    handle.remove()
    return {
        "error": max(relative_error(output, reference) for output in outputs),
        "held": held,
        "whole": weight_bytes(model),
        "restored": torch.equal(run_alone(model, inputs), reference),
        "weights": all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items()),
        "attributes": plain_attributes(model) == attributes,
        "hooks left": [name for name, module in model.named_modules() if hook_names(module)],
    }


def weight_bytes(model: nn.Module) -> int:
    """Return the bytes of parameters that the model holds."""
    return sum(parameter.nbytes for parameter in model.parameters())


def plain_attributes(model: nn.Module) -> dict[str, Any]:
    """Return every number and shape that a module has as an attribute, by path."""
    return {
        f"{path}.{name}": value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, int | tuple)
    }


def many_tensor_errors(prepared: dict[str, tuple], dims: ParallelDims) -> dict[str, dict[str, Any]]:
    """Run ``tensor_errors`` for several cases in one group of ranks."""
    assert dist.get_world_size() == dims.world_size
    return {name: tensor_errors(*case, dims) for name, case in prepared.items()}
