"""Which tensors and modules can be managed; asked before anything moves.

What this module does not do: it changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..errors import OffloadError, RequestError
from .config import OffloadConfig
from .gradients import HOOKS_WAY_OUT, has_other_accumulation_hooks
from .tensors import ManagedTensor

if TYPE_CHECKING:
    from .buckets import Bucket
    from .transfer import Transfer


def check_model(model: nn.Module, config: OffloadConfig) -> None:
    """Check the module tree.

    Raises:
        RequestError: If ``model`` is no module, or has in it what reads weights or gradients elsewhere.
    """
    if not isinstance(model, nn.Module):
        raise RequestError(
            f"Offloading was asked for a {type(model).__name__}",
            limit="It works on a torch.nn.Module",
            way_out="Pass the module itself",
        )
    for path, module in model.named_modules():
        if isinstance(module, DistributedDataParallel) and config.optimizer_on_host:
            raise RequestError(
                f"Offloading of optimizers was asked for {path or 'the model'}, a DistributedDataParallel",
                limit="Gradients go to the host before it could reduce them",
                way_out="Pass the model in it and all-reduce gradients after after_backward(), or use "
                "enable_optimizer_cpu_offload=False",
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise RequestError(
                f"Offloading was asked for {path or 'the model'}, a TorchScript module",
                limit="TorchScript reads its weights where no hook can see it",
                way_out="Pass the Python module that it was made from",
            )


def check_tensors(tensors: Iterable[ManagedTensor], config: OffloadConfig) -> None:
    """Check every tensor that is to be managed.

    Raises:
        RequestError: At the first that cannot be; it names the tensor, the reason and the way out.
    """
    for tensor in tensors:
        reason = _refusal(tensor.tensor, config)
        if reason is not None:
            limit, way_out = reason
            raise RequestError(
                f"Offloading was asked for {tensor.path} ({type(tensor.tensor).__name__}, "
                f"{tensor.tensor.dtype}, {tensor.tensor.device})",
                limit=limit,
                way_out=way_out,
            )


def check_trainable(tensors: Iterable[ManagedTensor]) -> None:
    """Check that nothing was unfrozen since it came under management.

    Raises:
        OffloadError: If a gradient would be on the wrong device.
    """
    for tensor in tensors:
        if tensor.tensor.requires_grad and not tensor.is_trainable:
            raise OffloadError(
                f"{tensor.path} requires a gradient now but was frozen when it came under offload "
                "management, so its gradient would be on the wrong device. Attach a new "
                "OffloadTrainingManager after changing requires_grad."
            )


def _refusal(tensor: torch.Tensor, config: OffloadConfig) -> tuple[str, str] | None:
    if is_lazy(tensor):
        return "It has no shape yet", "Run the model once, then attach"
    if is_traceable_wrapper_subclass(tensor):
        return _wrapper_refusal(tensor, config) or _leaf_refusals(tensor)
    if tensor.requires_grad and not tensor.is_leaf and config.optimizer_on_host:
        return "It is the result of a computation, so it has no gradient of its own", "Detach it first"
    if tensor.requires_grad and config.optimizer_on_host and has_other_accumulation_hooks(tensor):
        return "Its post-accumulate-grad hooks would see a part of its gradient", HOOKS_WAY_OUT
    if tensor.requires_grad and tensor.is_inference():
        return (
            "It was made under torch.inference_mode, so autograd cannot train it",
            "Clone it outside inference mode",
        )
    return _memory_refusal(tensor)


def _wrapper_refusal(tensor: torch.Tensor, config: OffloadConfig) -> tuple[str, str] | None:
    if not tensor.requires_grad:
        return None
    if config.optimizer_on_host:
        return (
            "A trainable wrapper subclass cannot change its device, so its optimizer cannot be offloaded",
            "Freeze it, or use enable_optimizer_cpu_offload=False",
        )
    if tensor.device != config.target_device:
        return (
            f"A trainable wrapper subclass stays on its device, which is not {config.target_device}",
            "Freeze it, or move it to the target before attaching",
        )
    return None


def _leaf_refusals(tensor: torch.Tensor) -> tuple[str, str] | None:
    names, _ = tensor.__tensor_flatten__()  # pyright: ignore[reportAttributeAccessIssue]
    for name in names:
        inner: torch.Tensor = getattr(tensor, name)
        if inner is not getattr(tensor, name):
            return (
                f"Its inner tensor {name!r} is made anew at every read",
                "Give the subclass a stored tensor",
            )
        is_wrapper: bool = is_traceable_wrapper_subclass(inner)
        found = _leaf_refusals(inner) if is_wrapper else _memory_refusal(inner)
        if found is not None:
            return found
    return None


def _memory_refusal(tensor: torch.Tensor) -> tuple[str, str] | None:
    if tensor.device.type not in ("cpu", "cuda"):
        return "Only tensors on the CPU or a CUDA device have bytes to move", "Load its weights first"
    if tensor.layout != torch.strided or tensor.is_quantized:
        kind = "a quantized tensor" if tensor.is_quantized else f"of layout {tensor.layout}"
        return f"It is {kind}; only dense memory moves", "Make it dense"
    if tensor.is_conj() or tensor.is_neg():
        return "It is a lazy conjugate or negative view", "Call resolve_conj() or resolve_neg() first"
    if tensor.numel() and not _has_memory(tensor):
        return "It has no memory of its own, and no __tensor_flatten__ that leads to some", "Unwrap it first"
    return None


def _has_memory(tensor: torch.Tensor) -> bool:
    if not torch._C._has_storage(tensor):
        return False
    try:
        return tensor.untyped_storage().data_ptr() != 0
    except RuntimeError:  # torch's answer for a wrapper's storage
        return False


def check_recordable(bucket: Bucket, transfer: Transfer) -> None:
    """Check that a bucket does not come in while its user is recorded as a CUDA graph.

    Raises:
        OffloadError: If it would: a replay would neither bring it in nor wait for it.
    """
    if bucket.pins == 0 and transfer.is_recording():
        raise OffloadError(
            f"the weights of {bucket.name} came in while a CUDA graph was recorded. Record only modules that "
            "move as a whole."
        )
