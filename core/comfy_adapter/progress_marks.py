"""Mark the progress of a worker's forward behind some of the model's repeated blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from ..module_hooks import Forward, ModuleHook, install_hook
from ..parallel import ModelPlan, repeated_blocks

_HOOK = "progress"
# On a GPU a mark is two small operations, and nobody looks more often than four times a second.
_MOST_MARKS = 16


class _Mark(ModuleHook):
    def __init__(self, mark: Callable[[], None]) -> None:
        self._mark = mark

    def run(self, forward: Forward, module: nn.Module, args: tuple, kwargs: dict) -> Any:
        output = forward(*args, **kwargs)
        self._mark()
        return output


def mark_progress(module: nn.Module, plan: ModelPlan, mark: Callable[[], None]) -> None:
    """Have ``mark`` called in each forward of ``module``, spread over its blocks.

    Args:
        module: The model. The hooks stay with it.
        plan: Its plan.
        mark: Must not wait for anything.
    """
    blocks = repeated_blocks(module, plan)
    for block in blocks[:: -(-len(blocks) // _MOST_MARKS) or 1]:
        install_hook(block, _HOOK, _Mark(mark))
