"""Lend a MODEL to training and give it back as it was.

While lent, the patcher's own mechanism has applied everything upstream nodes asked for (LoRA patches,
object patches, injections), and every weight is a normal tensor that autograd can use: nodes run in
inference mode, and the weights of a model loaded there cannot be saved for a backward pass.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import comfy.model_management
import comfy.model_patcher
import comfy.ops
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..errors import RequestError
from .model_stream import release_stream
from .streamed_patcher import StreamedPatcher
from .training import check_noise_model

_PLAIN = (Tensor, nn.Parameter, nn.Buffer)
# What ComfyUI's `load` sets on modules and its `unpatch_model` leaves there.
_LOADER_ATTRIBUTES = (
    "comfy_cast_weights",
    "prev_comfy_cast_weights",
    "comfy_force_cast_weights",
    "weight_function",
    "bias_function",
)
_REFUSED_OPTIONS = ("model_function_wrapper", "sampler_calc_cond_batch_function", "context_handler")


def check_trainable(model: Any) -> None:
    """Refuse a MODEL that carries something training would ignore.

    Raises:
        RequestError: Naming it.
    """
    check_noise_model(model)
    options = model.model_options
    wrappers = [model.wrappers, options.get("transformer_options", {}).get("wrappers", {})]
    carried = [
        *(f"a wrapper ({kind})" for table in wrappers for kind, keys in table.items() if any(keys.values())),
        *(f"an option ({name})" for name in _REFUSED_OPTIONS if options.get(name) is not None),
        *(f"an injection ({name}; a LoRA in bypass mode is one)" for name in model.injections),
        *(f"another model ({name})" for name, models in model.additional_models.items() if models),
    ]
    if "ferry_parallel" in model.attachments:
        carried.append("the work of Parallel Model")
    if carried:
        raise RequestError(
            f"the MODEL carries {', '.join(sorted(set(carried)))}",
            limit="Training would run without it, or cannot learn through it",
            way_out="Connect the MODEL from before that node (a LoRA without bypass is honoured)",
        )


def training_dtype(model: Any, name: str) -> torch.dtype:
    """Return the compute dtype for ``"auto"``, ``"bf16"`` or ``"fp32"``.

    ``auto`` is what the model samples in, but bf16 (fp32 without hardware for it) where that is fp16,
    whose gradients underflow.
    """
    if name != "auto":
        return {"bf16": torch.bfloat16, "fp32": torch.float32}[name]
    native = model.model.manual_cast_dtype or model.model.get_dtype()
    if native in (torch.bfloat16, torch.float32):
        return native
    has_bf16 = comfy.model_management.should_use_bf16(model.load_device)
    return torch.bfloat16 if has_bf16 else torch.float32


@contextlib.contextmanager
def borrowed_model(model: Any, *, dtype: torch.dtype, keep_on_host: bool) -> Iterator[Any]:
    """Yield a patcher of ``model`` ready for training, and undo everything afterwards.

    Args:
        model: The MODEL; nobody else may use it meanwhile.
        dtype: What it computes in.
        keep_on_host: Leave the weights on the patcher's offload device; False loads all of them onto
            the load device.
    """
    patcher = plain_clone(model)
    comfy.model_management.unload_all_models()
    patcher.set_model_compute_dtype(dtype)
    patcher.model_patches_to(patcher.load_device)
    patcher.model_patches_to(dtype)
    with _restored_attributes(patcher.model):
        try:
            patcher.patch_model(device_to=patcher.offload_device if keep_on_host else patcher.load_device)
            patcher.pre_run()
            with torch.inference_mode(False), torch.enable_grad(), in_training():
                with _normal_tensors(patcher.model):
                    yield patcher
        finally:
            patcher.cleanup()
            patcher.unpatch_model(patcher.offload_device, unpatch_weights=True)
    comfy.model_management.soft_empty_cache()


def plain_clone(model: Any) -> Any:
    """Return a clone whose weights only ``ModelPatcher``'s own code moves, over weights at rest.

    Raises:
        RequestError: If the MODEL has dynamic VRAM and its loader cannot make it anew.
    """
    if isinstance(model, StreamedPatcher):
        release_stream(model)
        clone = model.clone()
        clone.__class__ = comfy.model_patcher.ModelPatcher
        return clone
    # Dynamic VRAM moves weights by itself, below any hook.
    if not getattr(model, "is_dynamic", lambda: False)():
        return model.clone()
    try:
        return model.clone(disable_dynamic=True)
    except RuntimeError as error:
        raise RequestError(
            f"training {type(model.model).__name__} was asked",
            limit=f"Its loader gives no copy without dynamic VRAM ({error})",
            way_out="Load it with a core loader, or start ComfyUI with --disable-dynamic-vram",
        ) from error


@contextlib.contextmanager
def _restored_attributes(model: nn.Module) -> Iterator[None]:
    before = [
        (module, {name: module.__dict__[name] for name in _LOADER_ATTRIBUTES if name in module.__dict__})
        for module in model.modules()
    ]
    try:
        yield
    finally:
        for module, attributes in before:
            for name in _LOADER_ATTRIBUTES:
                module.__dict__.pop(name, None)
            module.__dict__.update(attributes)


@contextlib.contextmanager
def in_training() -> Iterator[None]:
    """Tell ComfyUI to keep to code that has gradients."""
    management: Any = comfy.model_management
    ops: Any = comfy.ops
    fp8_linear = ops.fp8_linear
    has_flag = hasattr(management, "in_training")
    before = management.in_training if has_flag else False
    try:
        if has_flag:
            management.in_training = True
        # It has no gradient. Some layers take it where none is wanted, so that a block's first run would
        # differ from its second; others fail in it. Given None, all of them go on with a plain matmul.
        ops.fp8_linear = lambda layer, x: None
        yield
    finally:
        if has_flag:
            management.in_training = before
        ops.fp8_linear = fp8_linear


@contextlib.contextmanager
def _normal_tensors(model: nn.Module) -> Iterator[None]:
    """Replace every parameter and buffer by a stand-in without gradient that shares its memory.

    The originals are emptied meanwhile, so that the offload engine owns the only copy, and get their
    values back at the end, wherever the stand-ins then hold them.
    """
    stand_ins: dict[int, tuple[Tensor, Tensor]] = {}
    slots = [
        (table, name, tensor)
        for module in model.modules()
        for table in (_table(module._parameters), _table(module._buffers))
        for name, tensor in table.items()
        if tensor is not None
    ]
    for _, _, tensor in slots:
        if id(tensor) not in stand_ins:
            stand_ins[id(tensor)] = (tensor, _stand_in(tensor))
    plain = [pair for pair in stand_ins.values() if type(pair[0]) in _PLAIN]
    try:
        for table, name, tensor in slots:
            table[name] = stand_ins[id(tensor)][1]
        for original, stand_in in plain:
            _point_at(original, torch.empty(0, dtype=stand_in.dtype, device=stand_in.device))
        yield
    finally:
        for table, name, original in slots:
            table[name] = original
        for original, stand_in in plain:
            _point_at(original, stand_in)


def _table(table: Any) -> dict[str, Tensor | None]:
    return table


def _stand_in(tensor: Tensor) -> Tensor:
    if is_traceable_wrapper_subclass(tensor):
        names, context = tensor.__tensor_flatten__()  # pyright: ignore[reportAttributeAccessIssue]
        inner = {name: _alias(getattr(tensor, name)) for name in names}
        wrapper: Any = type(tensor)
        plain = wrapper.__tensor_unflatten__(inner, context, tensor.size(), tensor.stride())
    elif type(tensor) in _PLAIN:
        plain = _alias(tensor)
    else:
        raise RequestError(
            f"a weight of type {type(tensor).__name__} was given",
            limit="Training knows plain tensors and torch's wrapper subclasses only",
            way_out="Load the model with a core loader",
        )
    if not isinstance(tensor, nn.Parameter):
        return plain
    parameter = nn.Parameter(plain, requires_grad=False)
    vars(parameter).update(vars(tensor))
    return parameter


def _alias(tensor: Tensor) -> Tensor:
    """Return a tensor on the same memory; normal or inference, as the mode it is made in."""
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())


def _point_at(original: Tensor, values: Tensor) -> None:
    # An inference tensor has no version counter, so only another inference tensor may take its place.
    with torch.inference_mode(original.is_inference()), torch.no_grad():
        original.data = _alias(values)
