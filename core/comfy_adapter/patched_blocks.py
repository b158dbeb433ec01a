"""Patch the weights of a block each time it runs, where patched weights would take the host's memory.

The workers of one machine share one copy of the weights. On GPUs what a LoRA makes of them lies in the GPUs'
memory; on CPU workers each would hold a copy of its own of every patched weight. Small ones are held, as
on GPUs. Of large ones, each block's are made when it runs, by the same arithmetic, and dropped behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import comfy.utils
import torch
from torch import nn

from ..module_hooks import Forward, ModuleHook, install_hook, remove_hook
from ..parallel import ModelPlan, repeated_blocks

_HOOK = "patches"
# A quarter of what a worker may take beside the weights.
MOST_HELD_BYTES = 256 << 20


class PatchedBlocks:
    """Which weights of a model are patched while their block runs.

    Args:
        module: The model.
        plan: Its plan, which names the blocks.
    """

    def __init__(self, module: nn.Module, plan: ModelPlan) -> None:
        self._module = module
        names = {id(each): name for name, each in module.named_modules()}
        self._blocks = {names[id(block)]: block for block in repeated_blocks(module, plan)}
        self._hooked: list[nn.Module] = []

    def patch(
        self,
        weights: Mapping[str, torch.Tensor],
        names: Iterable[str],
        make: Callable[[str], torch.Tensor | None],
    ) -> set[str]:
        """Patch these weights whenever their block runs, and no others; return those that are in a block.

        Args:
            weights: The weights as they are, by name.
            names: What is to be patched.
            make: Returns a patched weight as this rank holds it, None if another rank does.
        """
        for block in self._hooked:
            remove_hook(block, _HOOK)
        self._hooked = []
        inside: dict[str, list[str]] = {}
        for name in names:
            path = next((path for path in self._blocks if name.startswith(f"{path}.")), None)
            if path is not None:
                inside.setdefault(path, []).append(name)
        if sum(weights[name].nbytes for each in inside.values() for name in each) <= MOST_HELD_BYTES:
            return set()
        for path, each in inside.items():
            block = self._blocks[path]
            install_hook(block, _HOOK, _Patches(self._module, each, make))
            self._hooked.append(block)
        return {name for each in inside.values() for name in each}


class _Patches(ModuleHook):
    def __init__(
        self, module: nn.Module, names: list[str], make: Callable[[str], torch.Tensor | None]
    ) -> None:
        self._module = module
        self._names = names
        self._make = make

    def run(self, forward: Forward, module: nn.Module, args: tuple, kwargs: dict) -> object:
        before: dict[str, torch.Tensor] = {}
        try:
            for name in self._names:
                patched = self._make(name)
                if patched is not None:
                    before[name] = comfy.utils.get_attr(self._module, name)
                    comfy.utils.set_attr_param(self._module, name, patched)
            return forward(*args, **kwargs)
        finally:
            for name, weight in before.items():
                comfy.utils.set_attr(self._module, name, weight)
