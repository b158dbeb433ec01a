"""Linear weights that stay quantized wherever they lie and become numbers where they are used.

A ``PackedWeight`` is a wrapper subclass around its blocks, so it is moved, pinned and streamed as any
quantized weight is: by the bytes of its blocks. ``torch.nn.functional.linear`` makes it dense for the time
of the product, in the forward and again in the backward; autograd keeps the blocks alone. Every other
operation sees the dense weight. To PyTorch it has the shape and dtype of that.

What this module does not do: a packed weight is not trained and not written to; a view of one is a copy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from typing_extensions import override

from ..errors import OffloadError
from .gguf_blocks import GGUF_FORMATS, dequantize

_aten: Any = torch.ops.aten
# Dtypes that a packed weight may be said to have; others (fp8) are worth having dense.
_COMPUTE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
Change = Callable[[Tensor], Tensor]


class PackedWeight(Tensor):
    """A ``[rows, columns]`` weight, held as quantized blocks.

    Args:
        blocks: uint8 ``[rows, bytes of a row]``, contiguous.
        form: A key of ``GGUF_FORMATS``.
        dtypes: What the values are rounded to, one after the other; the last is the weight's dtype.
        change: Takes the dense weight, returns what stands for it (of the same shape); None: itself.

    Attributes:
        blocks: As above.
        form: As above.
        dtypes: As above.
        change: As above.
    """

    blocks: Tensor
    form: str
    dtypes: tuple[torch.dtype, ...]
    change: Change | None

    @staticmethod
    @override
    def __new__(
        cls: Any, blocks: Tensor, form: str, dtypes: tuple[torch.dtype, ...], change: Change | None = None
    ) -> PackedWeight:
        layout = GGUF_FORMATS[form]
        size = (blocks.shape[0], blocks.shape[1] // layout.nbytes * layout.weights)
        return Tensor._make_wrapper_subclass(cls, size, dtype=dtypes[-1], device=blocks.device)  # pyright: ignore

    def __init__(
        self, blocks: Tensor, form: str, dtypes: tuple[torch.dtype, ...], change: Change | None = None
    ) -> None:
        self.blocks = blocks
        self.form = form
        self.dtypes = dtypes
        self.change = change

    def dense(self) -> Tensor:
        """Return the weight as an ordinary tensor of its own, on the device where the blocks are."""
        with torch.no_grad():
            values = dequantize(self.blocks, self.form, self.dtypes)
            return values if self.change is None else self.change(values)

    def changed(self, change: Change) -> PackedWeight:
        """Return the same blocks with another change, which takes the dense weight as it is unchanged."""
        return PackedWeight(self.blocks, self.form, self.dtypes, change)

    @property
    @override
    def nbytes(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Bytes of the blocks."""
        return self.blocks.numel()

    def _kind(self) -> tuple:
        return self.form, self.dtypes, self.change

    def _around(self, blocks: Tensor) -> PackedWeight:
        return PackedWeight(blocks, *self._kind())

    def __tensor_flatten__(self) -> tuple[list[str], tuple]:
        """Return what PyTorch needs to take it apart."""
        return ["blocks"], self._kind()

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: tuple, size: Any, stride: Any
    ) -> PackedWeight:
        """Build a like one around other blocks."""
        return PackedWeight(inner["blocks"], *context)

    @override
    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"PackedWeight({self.form}, {tuple(self.shape)}, {self.dtype}, {self.device})"

    @classmethod
    @override
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            call: Any = _FUNCTIONS.get(func, func)
            return call(*args, **(kwargs or {}))

    @classmethod
    @override
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        special = _OPERATIONS.get(func)
        if special is not None and isinstance(args[0], cls):
            return special(*args, **kwargs)
        if func.overloadpacket in _COMPOSED:  # where autograd, which would do this, is not there
            return func.decompose(*args, **kwargs)
        if func._schema.is_mutable:
            _check_unwritten(func, args, kwargs)
        plain_args, plain_kwargs = tree_map(_dense, (args, kwargs))
        return func(*plain_args, **plain_kwargs)


def _dense(value: Any) -> Any:
    return value.dense() if isinstance(value, PackedWeight) else value


def _check_unwritten(func: Any, args: tuple, kwargs: dict) -> None:
    named = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)}
    for argument in func._schema.arguments:
        value = kwargs.get(argument.name, named.get(argument.name))
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        if is_written and any(isinstance(leaf, PackedWeight) for leaf in tree_leaves(value)):
            raise OffloadError(f"{func} would write to a weight that is held in quantized blocks.")


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``torch.nn.functional.linear`` of a packed weight."""
    if not isinstance(weight, PackedWeight):
        return torch.nn.functional.linear(input, weight, bias)
    if torch.is_grad_enabled():
        if weight.requires_grad:
            raise OffloadError("A weight that is held in quantized blocks cannot be trained.")
        if input.requires_grad or (bias is not None and bias.requires_grad):
            return _PackedLinear.apply(input, weight, bias)  # pyright: ignore[reportReturnType]
    return torch.nn.functional.linear(input, weight.dense(), bias)


class _PackedLinear(torch.autograd.Function):
    """A linear layer of which autograd keeps the blocks, wherever those are at the backward."""

    @staticmethod
    @override
    def forward(ctx: Any, input: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight)
        return torch.nn.functional.linear(input, weight.dense(), bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    @override
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad_output: Tensor
    ) -> tuple[Tensor | None, None, Tensor | None]:
        grad_input = grad_bias = None
        if ctx.needs_input_grad[0]:
            (weight,) = ctx.saved_tensors
            grad_input = grad_output.matmul(weight.dense().to(grad_output.dtype))
        if ctx.needs_input_grad[2]:
            grad_bias = grad_output.reshape(-1, grad_output.shape[-1]).sum(0)
        return grad_input, None, grad_bias


def _to(tensor: Tensor, *args: Any, copy: bool = False, **kwargs: Any) -> Tensor:
    """Return ``Tensor.to``; who asks for a copy means to write to it."""
    if copy and isinstance(tensor, PackedWeight):
        tensor = tensor.dense()
    return tensor.to(*args, **kwargs)


def _alias(tensor: PackedWeight) -> PackedWeight:
    return tensor._around(tensor.blocks.detach())


def _clone(tensor: PackedWeight, *, memory_format: Any = None) -> PackedWeight:
    return tensor._around(tensor.blocks.clone())


def _to_copy(
    tensor: PackedWeight,
    *,
    dtype: torch.dtype | None = None,
    device: Any = None,
    non_blocking: bool = False,
    pin_memory: bool | None = None,
    **layout: Any,
) -> Tensor:
    """Return it on another device, or rounded once more over the same blocks.

    It is dense if it has a change and is to be rounded, or if nothing computes in that dtype.
    """
    dtype = tensor.dtype if dtype is None else dtype
    if dtype != tensor.dtype and (tensor.change is not None or dtype not in _COMPUTE_DTYPES):
        return tensor.dense().to(device=device, dtype=dtype, non_blocking=non_blocking)
    blocks = tensor.blocks
    if pin_memory or (device is not None and torch.device(device) != blocks.device):
        blocks = _aten._to_copy(blocks, device=device, non_blocking=non_blocking, pin_memory=pin_memory)
    return PackedWeight(blocks, tensor.form, _rounded(tensor.dtypes, dtype), tensor.change)


def _rounded(dtypes: tuple[torch.dtype, ...], dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    """Return what one more rounding makes of a chain; fp32 in it holds what came before exactly."""
    kept = dtypes[:-1] if len(dtypes) > 1 and dtypes[-1] == torch.float32 else dtypes
    return kept if dtype in kept[-1:] else (*kept, dtype)


def _copy(target: PackedWeight, source: Tensor, non_blocking: bool = False) -> PackedWeight:
    is_alike = isinstance(source, PackedWeight) and source._kind() == target._kind()
    if not is_alike or target.change is not None:
        raise OffloadError("Other numbers cannot be written to a weight that is held in quantized blocks.")
    target.blocks.copy_(source.blocks, non_blocking)  # pyright: ignore[reportAttributeAccessIssue]
    return target


def _set_item(tensor: Tensor, place: Any, value: Any) -> None:
    """Refuse ``tensor[place] = value``, which would write to a view of what is dense for a moment."""
    if isinstance(tensor, PackedWeight):
        raise OffloadError("A part of a weight that is held in quantized blocks cannot be written to.")
    tensor[place] = value


_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    torch.nn.functional.linear: _linear,
    Tensor.to: _to,
    Tensor.__setitem__: _set_item,
}
_COMPOSED = (_aten.to, _aten.contiguous)
_OPERATIONS: dict[Any, Callable[..., Any]] = {
    _aten.detach.default: _alias,
    _aten.alias.default: _alias,
    _aten.clone.default: _clone,
    _aten._to_copy.default: _to_copy,
    _aten.copy_.default: _copy,
    _aten.is_pinned.default: lambda tensor, device=None: tensor.blocks.is_pinned(),
    _aten._pin_memory.default: lambda tensor, device=None: tensor._around(tensor.blocks.pin_memory()),
}
