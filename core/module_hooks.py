"""Named, ordered, removable wrappers around ``torch.nn.Module.forward``.

A hook here is a *middleware*: it receives the call and decides what runs before and after it, so
one ``try/finally`` covers every way out of a forward, including ``BaseException`` (ComfyUI's
interrupt, Ctrl-C). ``torch``'s own forward hooks do not: an always-called hook is skipped for
anything that is not an ``Exception``, and full backward hooks turn inputs into views that an
in-place block may not write to.

What this module does not do: it never looks at tensors and knows no feature.

Idea: diffusers ``hooks/hooks.py`` (``ModelHook``, ``HookRegistry``), written anew as middleware.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

from torch import nn

Forward = Callable[..., Any]

# Where the module keeps our object besides `forward`, so that it is found under other code's wrapper.
_MARK = "_ferry_hooked_forward"


class ModuleHook:
    """One feature's wrapper around a module's forward. Subclasses override ``run``."""

    def run(self, forward: Forward, module: nn.Module, args: tuple, kwargs: dict) -> Any:
        """Call ``forward(*args, **kwargs)`` (once, unless the feature means otherwise).

        Args:
            forward: The next inner hook, or the module's own forward.
            module: The module being called.
            args: Positional arguments of the call.
            kwargs: Keyword arguments of the call.

        Returns:
            What the caller of the module receives.
        """
        return forward(*args, **kwargs)


class HookedForward:
    """The callable stored as ``module.__dict__["forward"]`` while hooks are installed.

    A deep copy or a pickle of a hooked module is *unhooked*: a hook's state belongs to the one
    module it was installed on.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.inner: Forward | None = module.__dict__.get("forward")
        self.hooks: dict[str, ModuleHook] = {}
        functools.update_wrapper(self, module.forward)

    def original(self) -> Forward:
        """Return the forward that was there before the first hook, bound to the module."""
        if self.inner is not None:
            return self.inner
        return types.MethodType(type(self.module).forward, self.module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the hooks around the original forward."""
        forward = self.original()
        for hook in reversed(self.hooks.values()):
            forward = functools.partial(_run_hook, hook, forward, self.module)
        return forward(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Forward:
        copied = memo.get(id(self.module))
        if copied is None or self.inner is not None:
            return self.original()
        return types.MethodType(type(copied).forward, copied)

    def __reduce__(self) -> tuple:
        # Not a bound method: pickle cannot name `types.MethodType`.
        return (functools.partial, (type(self.module).forward, self.module))


def _run_hook(hook: ModuleHook, forward: Forward, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return hook.run(forward, module, args, kwargs)


def install_hook(module: nn.Module, name: str, hook: ModuleHook) -> None:
    """Wrap ``module.forward`` with ``hook``; the first hook installed is the outermost.

    Raises:
        ValueError: If a hook of that name is already on the module.
    """
    hooked = _find_hooked(module)
    if hooked is None:
        hooked = HookedForward(module)
        module.__dict__["forward"] = hooked
        module.__dict__[_MARK] = hooked
    if name in hooked.hooks:
        raise ValueError(f"hook {name!r} is already installed on {type(module).__name__}; remove it first")
    hooked.hooks[name] = hook


def remove_hook(module: nn.Module, name: str) -> None:
    """Take the hook off again; with the last one gone ``module.__dict__`` is as it was before.

    If other code wrapped ``module.forward`` after us, our object stays inside its chain as a plain
    pass-through, because that code still holds it.
    """
    hooked = _find_hooked(module)
    if hooked is None or name not in hooked.hooks:
        return
    del hooked.hooks[name]
    if hooked.hooks:
        return
    del module.__dict__[_MARK]
    if module.__dict__.get("forward") is not hooked:
        return
    if hooked.inner is None:
        del module.__dict__["forward"]
    else:
        module.__dict__["forward"] = hooked.inner


def hook_names(module: nn.Module) -> list[str]:
    """Return the names of the hooks on ``module``, outermost first."""
    hooked = _find_hooked(module)
    return [] if hooked is None else list(hooked.hooks)


def own_forward(module: nn.Module) -> Forward | None:
    """Return the forward that other code had put on the module itself before the first hook, if any."""
    hooked = _find_hooked(module)
    return module.__dict__.get("forward") if hooked is None else hooked.inner


def _find_hooked(module: nn.Module) -> HookedForward | None:
    hooked = module.__dict__.get(_MARK)
    return hooked if isinstance(hooked, HookedForward) else None
