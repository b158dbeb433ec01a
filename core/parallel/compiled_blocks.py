"""Compile the repeated blocks of a parallel model with ``torch.compile``.

Compiled are the forwards of the model's own modules, inside of all hooks: what hooks do and attention over
ranks stay as they are, between the compiled parts. Blocks of one class share their compiled code, so a
model compiles as fast as its block; another shape compiles again.

Compiled code keeps intermediate results in fp32 where the model rounds them, so its output differs in the
last bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..module_hooks import Forward, ModuleHook, hook_names, install_hook, remove_hook
from ..module_paths import find_modules, has_modules
from .attention.local import AttentionFunction
from .plan import ModelPlan

_HOOK = "compiled"
# Each shape of the inputs is a variant of its own; more of them than this and PyTorch stops compiling.
_MAX_VARIANTS = 64


class CompiledBlocks:
    """A model whose repeated blocks are compiled, until ``remove``; install it after all other hooks.

    Args:
        model: The model, with its hooks.
        plan: Its plan: the blocks are what rules with ``*`` as the last part of the path select.
        backend: Of ``torch.compile``.
    """

    def __init__(self, model: nn.Module, plan: ModelPlan, *, backend: str | Callable = "inductor") -> None:
        dynamo: Any = torch._dynamo
        dynamo.config.recompile_limit = max(_MAX_VARIANTS, dynamo.config.recompile_limit)
        self._hooked: list[nn.Module] = []
        self._hidden: list[tuple[nn.Module, Any]] = []
        for block in repeated_blocks(model, plan):
            for module in block.modules():
                inside = module is not block and hook_names(module)
                if inside:
                    self._hide_hooks(module)
                if module is block or (inside and any(module.children())):
                    install_hook(module, _HOOK, CompiledForwardHook(backend))
                    self._hooked.append(module)

    def attention_override(self, override: AttentionFunction) -> AttentionFunction:
        """Return the attention override as compiled code may call it."""
        disabled: Any = torch.compiler.disable(override)
        return disabled

    def remove(self) -> None:
        """Take everything off again."""
        for module, forward in self._hidden:
            module.__dict__["forward"] = forward
        for module in self._hooked:
            remove_hook(module, _HOOK)
        self._hidden, self._hooked = [], []

    def _hide_hooks(self, module: nn.Module) -> None:
        """Keep the compiler out of the hooks of a module that compiled code calls."""
        hooked = module.__dict__["forward"]
        self._hidden.append((module, hooked))
        module.__dict__["forward"] = torch.compiler.disable(hooked)


class CompiledForwardHook(ModuleHook):
    """Calls the compiled form of what is inside; to be the innermost hook."""

    def __init__(self, backend: str | Callable) -> None:
        self._backend = backend
        self._compiled: Forward | None = None

    def run(self, forward: Forward, module: nn.Module, args: tuple, kwargs: dict) -> Any:
        """Compile at the first call."""
        if self._compiled is None:
            self._compiled = torch.compile(forward, backend=self._backend, dynamic=False)
        return self._compiled(*args, **kwargs)


def repeated_blocks(model: nn.Module, plan: ModelPlan) -> list[nn.Module]:
    """Return the modules that rules of the plan with ``*`` as the last part of the path select, in order."""
    paths = [rule.path for rule in plan.rules if rule.path.endswith(".*") and has_modules(model, rule.path)]
    blocks = {id(module): module for path in paths for _, module in find_modules(model, path)}
    return list(blocks.values())
