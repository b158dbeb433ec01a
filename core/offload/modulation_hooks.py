"""The hooks through which a modulation cache sees calls of its layers, and of the modules around them.

What this module does not do: it stores nothing and computes nothing; ``modulation`` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import nn
from typing_extensions import override

from ..module_hooks import Forward, ModuleHook, install_hook, remove_hook

if TYPE_CHECKING:
    from .modulation import ModulationCache
    from .modulation_layers import CachedLayer

HOOK_NAME = "modulation"
_CALL_HOOK_NAME = "modulation_call"


class ModulationHooks:
    """Puts the hooks of one cache on and takes them off."""

    def __init__(self) -> None:
        self._hooked: list[tuple[nn.Module, str]] = []

    def install(self, cache: ModulationCache, layers: Sequence[CachedLayer]) -> None:
        """Hook the layers and the modules around them."""
        for parent in {id(layer.parent): layer.parent for layer in layers}.values():
            self._install(parent, _CALL_HOOK_NAME, _CallHook(cache))
        for layer in layers:
            self._install(layer.linear, HOOK_NAME, _LayerHook(cache, layer))

    def remove(self) -> None:
        """Take every hook off."""
        for module, name in self._hooked:
            remove_hook(module, name)
        self._hooked.clear()

    def _install(self, module: nn.Module, name: str, hook: ModuleHook) -> None:
        install_hook(module, name, hook)
        self._hooked.append((module, name))


class _CallHook(ModuleHook):
    def __init__(self, cache: ModulationCache) -> None:
        self.cache = cache

    @override
    def run(self, forward: Forward, module: nn.Module, args: tuple, kwargs: dict) -> Any:
        return self.cache.call_parent(forward, module, args, kwargs)


class _LayerHook(ModuleHook):
    def __init__(self, cache: ModulationCache, layer: CachedLayer) -> None:
        self.cache = cache
        self.layer = layer

    @override
    def run(self, forward: Forward, module: nn.Module, args: tuple, kwargs: dict) -> Any:
        return self.cache.call_layer(self.layer, forward, args, kwargs)
