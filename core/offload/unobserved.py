"""Run the engine's own tensor operations where nothing that watches the model sees them.

Autograd would record them, a ``torch.func`` transform would wrap what they make, a dispatch mode
(selective checkpointing counts operations) or a default device would change them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch
from torch._C._functorch import peek_interpreter_stack
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes

P = ParamSpec("P")
R = TypeVar("R")
L = TypeVar("L", bound="_Locked")


@contextmanager
def unobserved() -> Iterator[None]:
    """Switch off grad mode, function overrides, dispatch modes and functional transforms."""
    with ExitStack() as stack:
        if peek_interpreter_stack() is not None:
            stack.enter_context(temporarily_clear_interpreter_stack())
        if torch._C._len_torch_dispatch_stack():
            stack.enter_context(_disable_current_modes())
        with torch.no_grad(), torch._C.DisableTorchFunction():
            yield


def run_unobserved(function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Call ``function`` within ``unobserved()``; quick when only grad mode has to be switched off."""
    if _is_observed():
        with unobserved():
            return function(*args, **kwargs)
    before = torch.is_grad_enabled()
    torch._C._set_grad_enabled(False)
    try:
        return function(*args, **kwargs)
    finally:
        torch._C._set_grad_enabled(before)


def uncompiled(method: Callable[..., Any]) -> Any:
    """Keep ``torch.compile`` out of a method: a graph breaks at its call.

    What ``torch._dynamo.disable`` makes takes the method's place at the first access, so that importing the
    pack does not import the compiler, and calls pay for one wrapper only.
    """
    return _Uncompiled(method)


class _Uncompiled:
    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method
        self.__doc__ = method.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._owner, self._name = owner, name

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        import torch._dynamo

        disabled: Any = torch._dynamo.disable(self._method, wrapping=False)
        setattr(self._owner, self._name, disabled)
        return disabled if instance is None else disabled.__get__(instance, owner)


class _Locked(Protocol):
    @property
    def lock(self) -> AbstractContextManager[Any]: ...


def exclusive(method: Callable[Concatenate[L, P], R]) -> Callable[Concatenate[L, P], R]:
    """Run a method under its object's ``lock``, unobserved."""

    @functools.wraps(method)
    def locked(owner: L, *args: P.args, **kwargs: P.kwargs) -> R:
        with owner.lock:
            return run_unobserved(method, owner, *args, **kwargs)

    return locked


def _is_observed() -> bool:
    return (
        peek_interpreter_stack() is not None
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._len_torch_function_stack() > 0
    )
