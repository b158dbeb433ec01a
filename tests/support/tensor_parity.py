"""The tester of tensor parallelism: ranks with a part of the weights give what the whole model gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from comfyui_ferry.core.module_hooks import hook_names
from comfyui_ferry.core.parallel import ModelPlan, ParallelDims, build_mesh, parallelize
from comfyui_ferry.core.plans import find_plan
from torch import nn

from .parity import moved, relative_error, run_alone, run_parallel, world_group
from .tiny_cases import CASES, TinyCase
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


def named_tensor_errors(names: list[str], dtype: torch.dtype, dims: ParallelDims) -> dict[str, float]:
    """Build each case on this rank's device and return the error of shared against whole weights."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    device = torch.device("cuda") if dist.get_backend() == "nccl" else torch.device("cpu")
    layout = build_mesh(dims)
    errors = {}
    for name in names:
        model, inputs = in_dtype(CASES[name], device, dtype)
        alone = moved(run_alone(model, inputs), torch.float32)
        plan = find_plan(f"{type(model).__module__}.{type(model).__qualname__}")
        handle = parallelize(model, plan, group=layout.sequence_group, tensor_group=layout.tensor_group)
        output = moved(run_parallel(model, handle, inputs), torch.float32)
        errors[name] = relative_error(output, alone)
        handle.remove()
    return errors


def in_dtype(case: TinyCase, device: torch.device, dtype: torch.dtype) -> tuple[nn.Module, Inputs]:
    """Return a case's model and inputs on a device in a dtype, as ComfyUI would give them."""
    model, inputs = case.build().to(device, dtype), moved(case.inputs(), device)
    if hasattr(model, "patch_embedding"):  # Wan builds and runs this layer in fp32 whatever the rest is
        model.patch_embedding.float()
    names = ("timestep", "timesteps", "a_timestep", "guidance")
    scalars = {name: inputs[name] for name in names if name in inputs}
    return model, moved(inputs, dtype) | scalars


def encoder_errors(models: dict[str, tuple], encode: Callable[[nn.Module], torch.Tensor]) -> dict[str, Any]:
    """Run one rank of several text encoders (model, plan, output of the whole one)."""
    seen = {}
    for name, (model, plan, reference) in models.items():
        before = plain_attributes(model)
        handle = parallelize(model, plan, tensor_group=world_group())
        error, held = relative_error(encode(model), reference), weight_bytes(model)
        handle.remove()
        restored = torch.equal(encode(model), reference) and plain_attributes(model) == before
        seen[name] = {"error": error, "held": held / weight_bytes(model), "restored": restored}
    return seen


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
