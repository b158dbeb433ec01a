"""Which modules of a streamed model have a hook: its blocks, at first their parts too, and its entry.

Some models walk through a block's layers themselves instead of calling the block. So at first every
module inside a block that owns tensors has a hook as well; after the first pass only those of blocks
that were never called keep theirs.

What this module does not do: it moves nothing; ``stream_flow`` does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from ..module_hooks import install_hook, remove_hook
from .stream_asides import StreamAsides
from .stream_block import StreamBlock
from .stream_flow import BeforePass, BlockFlow, BlockHook, Forward, PartHook, PassHook
from .stream_stats import PassClock

HOOK_NAME = "stream"
_PART_NAME = "stream_part"


class StreamHooks:
    """Installs the hooks of one model and takes them off.

    Args:
        entry: The module whose forward is one pass.
        blocks: The blocks.
        asides: The layers that have hooks of their own.
        flow: What the hooks tell.
        clock: What the entry's hook tells.
    """

    def __init__(
        self,
        entry: nn.Module,
        blocks: Sequence[StreamBlock],
        *,
        asides: StreamAsides,
        flow: BlockFlow,
        clock: PassClock,
    ) -> None:
        self._entry = entry
        self._blocks = blocks
        self._asides = asides
        self._flow = flow
        self._clock = clock
        self._parts: list[tuple[StreamBlock, nn.Module]] = []
        self.before_pass: BeforePass | None = None
        self.after_pass: Callable[[], None] | None = None

    def install(self) -> None:
        """Put every hook on."""
        hook = PassHook(self._flow, self._clock, self._begin_pass, self._end_pass)
        install_hook(self._entry, HOOK_NAME, hook)
        self._asides.install()
        for block in self._blocks:
            install_hook(block.plan.module, HOOK_NAME, BlockHook(self._flow, block))
            if not self._flow.is_called(block):
                for module in {id(entry.module): entry.module for entry in block.plan.entries}.values():
                    if module is not block.plan.module:
                        install_hook(module, _PART_NAME, PartHook(self._flow, block))
                        self._parts.append((block, module))

    def run_pass(self, forward: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """Run one pass by a function other than the entry's forward."""
        hook = PassHook(self._flow, self._clock, self._begin_pass, self._end_pass)
        return hook.run(forward, self._entry, args, kwargs)

    def remove(self) -> None:
        """Take every hook off."""
        remove_hook(self._entry, HOOK_NAME)
        self._asides.remove()
        for block in self._blocks:
            remove_hook(block.plan.module, HOOK_NAME)
        self._remove_parts(lambda block: True)

    def _begin_pass(self, forward: Forward, args: tuple, kwargs: dict) -> None:
        if self.before_pass is not None:
            self.before_pass(forward, args, kwargs)

    def _end_pass(self) -> None:
        self._remove_parts(self._flow.is_called)
        if self.after_pass is not None:
            self.after_pass()

    def _remove_parts(self, is_done: Callable[[StreamBlock], bool]) -> None:
        kept = []
        for block, module in self._parts:
            if is_done(block):
                remove_hook(module, _PART_NAME)
            else:
                kept.append((block, module))
        self._parts = kept
