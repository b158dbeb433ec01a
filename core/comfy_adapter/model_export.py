"""What a worker needs to rebuild a ComfyUI diffusion model: a plain description and its tensors."""

from __future__ import annotations

import sys
from typing import Any

import comfy.cli_args
import comfy.ops
import comfy.options
import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..errors import RequestError
from . import packed_weights, quantized

_PLAIN = (type(None), bool, int, float, str)


def class_path(diffusion_model: nn.Module) -> str:
    """Return the dotted path of the model's class, for example ``comfy.ldm.flux.model.Flux``."""
    cls = type(diffusion_model)
    return f"{cls.__module__}.{cls.__qualname__}"


def innermost_forward(diffusion_model: nn.Module) -> str:
    """Return the name of the method that only computes: ``_forward``, around which ComfyUI's wrappers run.

    Classes without wrappers (Stable Diffusion 3) have ``forward`` alone.
    """
    return "_forward" if hasattr(type(diffusion_model), "_forward") else "forward"


def describe_model(model: Any) -> dict[str, Any]:
    """Return the message from which a worker builds the same, empty diffusion model.

    Args:
        model: A ``comfy.model_base.BaseModel``.

    Raises:
        RequestError: If the weights are of a kind that workers cannot hold yet.
    """
    module = model.diffusion_model
    for name, tensor in named_tensors(module).items():
        if is_traceable_wrapper_subclass(tensor):
            layout = getattr(tensor, "_layout_cls", "")
            raise _unsupported_weights(module, f"{name} is a {type(tensor).__name__} {layout}".rstrip())
    operations = _operations_name(module)
    description = {
        "class_path": class_path(module),
        "unet_config": dict(model.model_config.unet_config),
        "operations": operations,
    }
    if operations == quantized.OPERATIONS:
        description["quantized"] = quantized.describe_layers(module)
    packed = packed_weights.describe(module)
    if packed:
        description["packed"] = packed
    return description


def named_parameters(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return every parameter and buffer by name, persistent or not, shared ones under each name."""
    tensors: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
    tensors.update(module.named_buffers(remove_duplicate=False))
    return tensors


def named_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the plain tensors of every parameter and buffer by name; a quantized one has several."""
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in named_parameters(module).items():
        tensors.update(quantized.plain_tensors(name, tensor))
    return tensors


def comfyui_arguments() -> dict[str, Any]:
    """Return this process' ComfyUI command line as a message, so that workers compute alike.

    ``argv`` is parsed again in the worker; ``values`` are the plain settings as they are now, since
    ComfyUI changes some after parsing.
    """
    values = {name: value for name, value in vars(comfy.cli_args.args).items() if isinstance(value, _PLAIN)}
    return {"argv": sys.argv[1:] if comfy.options.args_parsing else [], "values": values}


def _operations_name(module: nn.Module) -> str:
    """Return which class of ``comfy.ops`` the Linear layers come from, for example ``manual_cast``."""
    if any(map(quantized.is_mixed_linear, module.modules())):
        return quantized.OPERATIONS
    operations = linear_operations(module)
    if operations is not None:
        return operations
    foreign = {type(layer).__qualname__ for layer in module.modules() if isinstance(layer, nn.Linear)}
    raise _unsupported_weights(module, f"its Linear layers are {sorted(foreign)}")


def linear_operations(module: nn.Module) -> str | None:
    """Return which class of ``comfy.ops`` all Linear layers come from, by name; None if there is no one."""
    linear = [layer for layer in module.modules() if isinstance(layer, nn.Linear)]
    names = {type(layer).__qualname__.rpartition(".")[0] for layer in linear}
    own = all(type(layer).__module__ == comfy.ops.__name__ for layer in linear)
    return names.pop() if own and len(names) == 1 and hasattr(comfy.ops, next(iter(names))) else None


def _unsupported_weights(module: nn.Module, what: str) -> RequestError:
    return RequestError(
        f"parallel sampling of {type(module).__name__} was asked, but {what}",
        limit="Workers hold plain weights and, in newer ComfyUI, its fp8, mxfp8, nvfp4 and int8 layouts",
        way_out="Load such a file with the stock loader",
    )
