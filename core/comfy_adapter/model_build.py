"""Build ComfyUI's model for a file without a second copy of the weights.

ComfyUI's own loader does everything: detection, dtypes, quantisation, the model. Only its last step,
copying the file's tensors into parameters that it has just allocated, is another one for the time of
the call: the tensors themselves become the parameters.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import comfy.model_base
import comfy.model_detection
import comfy.model_management
import comfy.sd
import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..errors import RequestError
from ..offload import PackedWeight
from ..workers import UnchangedFilePages

WEIGHT_DTYPES: dict[str, dict[str, Any]] = {
    "default": {},
    "fp8_e4m3fn": {"dtype": torch.float8_e4m3fn},
    "fp8_e4m3fn_fast": {"dtype": torch.float8_e4m3fn, "fp8_optimizations": True},
    "fp8_e5m2": {"dtype": torch.float8_e5m2},
}

# ComfyUI's layers that call torch.nn.functional.linear; its others have products of their own.
_PLAIN_LINEAR = ("comfy.ops.disable_weight_init.Linear", "comfy.ops.manual_cast.Linear")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_lock = threading.Lock()
# What ComfyUI's detection raises on tensors that are no model of its.
_FOREIGN_ERRORS = (
    RuntimeError,
    LookupError,
    ValueError,
    TypeError,
    AttributeError,
    ArithmeticError,
    AssertionError,
)


def build_diffusion_model(
    name: str, tensors: dict[str, torch.Tensor], metadata: dict[str, str], *, weight_dtype: str
) -> Any:
    """Return a plain ``ModelPatcher`` whose parameters are ``tensors`` where their dtype allows it.

    Args:
        name: For messages.
        tensors: The model's tensors, alone or among a checkpoint's; emptied.
        metadata: The file's metadata.
        weight_dtype: A key of ``WEIGHT_DTYPES``, as in the stock loader.

    Raises:
        RequestError: If they are no diffusion model that ComfyUI knows, or not all of one.
    """
    if weight_dtype not in WEIGHT_DTYPES:
        raise RequestError(
            f"weight_dtype={weight_dtype!r} was asked",
            limit=f"There are {', '.join(WEIGHT_DTYPES)}",
            way_out="Choose one of them",
        )
    load = comfy.sd.load_diffusion_model_state_dict
    options: dict[str, Any] = {
        "model_options": dict(WEIGHT_DTYPES[weight_dtype]),
        "metadata": metadata or None,
    }
    if "disable_dynamic" in inspect.signature(load).parameters:
        options["disable_dynamic"] = True
    try:
        with _assigning():
            patcher = load(tensors, **options)
    except RequestError as error:
        raise RequestError(f"{name}: {error.asked}", limit=error.limit, way_out=error.way_out) from error
    except _FOREIGN_ERRORS as error:
        reason = str(error).strip().splitlines()
        raise _unknown(name, f"{type(error).__name__}: {' '.join(reason[:2])}") from error
    if patcher is None:
        raise _unknown(name, "no model of its has these names and shapes")
    return patcher


@contextlib.contextmanager
def _assigning() -> Iterator[None]:
    with _lock:
        base, detection = comfy.model_base.BaseModel, comfy.model_detection
        load, convert = base.load_model_weights, detection.convert_diffusers_mmdit
        base.load_model_weights = _load_model_weights
        detection.convert_diffusers_mmdit = functools.partial(_convert_dense, convert)
        try:
            yield
        finally:
            base.load_model_weights = load
            detection.convert_diffusers_mmdit = convert


def _convert_dense(convert: Callable[..., Any], state: dict[str, Any], *args: Any) -> Any:
    """Translate the names of another format, in which tensors are cut, joined and written to."""
    for name, tensor in state.items():
        if isinstance(tensor, PackedWeight):
            state[name] = tensor.dense()
    return convert(state, *args)


def _load_model_weights(self: Any, sd: dict[str, Any], unet_prefix: str = "", assign: bool = True) -> Any:
    """Make the state dict's tensors the model's; what remains of ``sd`` is what the model did not take."""
    names = [key for key in sd if key.startswith(unet_prefix)]
    weights = {key[len(unet_prefix) :]: sd.pop(key) for key in names}
    weights = self.model_config.process_unet_state_dict(weights)
    denoiser = self.diffusion_model
    wanted = {name: tensor.dtype for name, tensor in _tensors(denoiser).items()}
    _check_kinds(weights, wanted)
    missing, _ = denoiser.load_state_dict(weights, strict=False, assign=True)
    _check_complete(denoiser, missing)
    pages = UnchangedFilePages()
    for name, tensor in _tensors(denoiser).items():
        if isinstance(tensor, PackedWeight):
            _settle_packed(denoiser, name, wanted[name])
        elif wanted.get(name, tensor.dtype) != tensor.dtype and not is_traceable_wrapper_subclass(tensor):
            _cast(denoiser, name, wanted[name])
            # The file's mapping stays, and what was read through it would count as this process' memory.
            pages.drop(tensor)
    return self


def _settle_packed(module: nn.Module, name: str, dtype: torch.dtype) -> None:
    """Leave a packed weight so where its layer multiplies by it and nothing else; dense elsewhere."""
    path, _, last = name.rpartition(".")
    owner = module.get_submodule(path)
    tensor = owner._parameters[last]
    weight: Any = tensor.to(dtype)  # pyright: ignore[reportOptionalMemberAccess]
    if last != "weight" or f"{type(owner).__module__}.{type(owner).__qualname__}" not in _PLAIN_LINEAR:
        weight = weight.to(dtype, copy=True)
    owner._parameters[last] = nn.Parameter(weight, requires_grad=False)


def _tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _cast(module: nn.Module, name: str, dtype: torch.dtype) -> None:
    """Give a tensor the dtype that the model was built for, as a copy in memory of its own."""
    path, _, last = name.rpartition(".")
    owner = module.get_submodule(path)
    if last in owner._parameters:
        cast = owner._parameters[last].to(dtype)  # pyright: ignore[reportOptionalMemberAccess]
        owner._parameters[last] = nn.Parameter(cast, requires_grad=False)
    else:
        owner._buffers[last] = owner._buffers[last].to(dtype)  # pyright: ignore[reportOptionalMemberAccess]


def _check_kinds(weights: dict[str, Any], wanted: dict[str, torch.dtype]) -> None:
    """Refuse whole numbers where the model computes with fractions."""
    wrong = [
        f"{name} ({tensor.dtype})"
        for name, tensor in weights.items()
        if name in wanted
        and wanted[name].is_floating_point
        and not tensor.dtype.is_floating_point
        and not is_traceable_wrapper_subclass(tensor)
    ]
    if wrong:
        raise RequestError(
            f"weights of a wrong dtype were given: {', '.join(wrong[:5])}",
            limit="The model has fractions there",
            way_out="Download or save the file again",
        )


def _check_complete(module: nn.Module, missing: list[str]) -> None:
    """Refuse a file without a weight that ComfyUI leaves uninitialised."""
    parameters = dict(module.named_parameters())
    # With any number for a block's: what one block has in the file, the others need from there too.
    given = {_NUMBER.sub("#", name) for name in set(parameters).difference(missing)}
    absent = []
    for name in missing:
        path, _, last = name.rpartition(".")
        # Other parameters of layers (scales of fp8) have a value to begin with.
        if hasattr(module.get_submodule(path), "comfy_cast_weights"):
            if last in ("weight", "bias"):
                absent.append(name)
        elif name in parameters and _NUMBER.sub("#", name) in given:
            absent.append(name)
    if absent:
        raise RequestError(
            f"{len(absent)} weights are not in the file, for example {absent[:3]}",
            limit="Without them the model would compute with whatever was in memory",
            way_out="Download or save the file again",
        )


def _unknown(name: str, reason: str) -> RequestError:
    return RequestError(
        f"loading {name} as a diffusion model was asked",
        limit=f"ComfyUI does not know it as one, or its tensors do not fit ({reason})",
        way_out="Check the file; text encoders, VAEs and LoRAs have loaders of their own",
    )
