"""Modulation layers of a streamed model: apart from their blocks, and streamed once for many steps.

They are blocks of their own. While they do not stay on the target, a ``ModulationCache`` serves them:
each comes in once, for all inputs that are known of, when the model calls it. Their copies run ahead
through two buffers (``stream_aside_buffers``), beside the blocks that compute meanwhile.

What this module does not do: it finds no layers (``modulation_layers``) and stores no outputs.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import nn
from typing_extensions import override

from ..module_hooks import Forward, ModuleHook, install_hook, remove_hook
from .modulation import ModulationCache
from .modulation_layers import CachedLayer, ModulationPlan, find_layers
from .stream_aside_buffers import AsideBuffers
from .stream_block import StreamBlock
from .stream_buffers import StreamPool
from .stream_stats import PassClock

# Room for outputs, in vectors: the steps of most samplings, half as many with guidance in one batch.
_NUM_STORED_ROWS = 32
_HOOK_NAME = "stream"


def modulation_linears(root: nn.Module, plan: ModulationPlan | None) -> list[nn.Module]:
    """Return the Linear layers that ``plan`` names.

    Raises:
        RequestError: If the plan does not fit the model.
    """
    layers = find_layers(root, plan, is_frozen=True) if plan is not None else []
    return [layer.linear for layer in layers]


class StreamAsides:
    """The modulation layers of one model: where their bytes are, and their cache.

    Args:
        blocks: One for each layer.
        pool: Copies.
        clock: Learns of every wait.

    Attributes:
        is_resident: Whether they all stay on the target.
        cache: Serves them while they do not; None if there are none.
    """

    def __init__(self, blocks: Sequence[StreamBlock], pool: StreamPool, clock: PassClock) -> None:
        self.blocks = list(blocks)
        self.is_resident = False
        self.cache: ModulationCache | None = None
        self._pool = pool
        self._clock = clock
        self._buffers = AsideBuffers(self.blocks, pool, clock)

    def make_cache(
        self, root: nn.Module, plan: ModulationPlan, open_probe: Callable[[], AbstractContextManager[None]]
    ) -> None:
        """Have a cache of the layers that ``plan`` names, as far as they are among the blocks.

        Args:
            root: The model.
            plan: The layers.
            open_probe: A context for calls that end at their first modulation layer.
        """
        by_module = {id(block.plan.module): block for block in self.blocks}

        def make(parent: nn.Module, linear: nn.Module) -> CachedLayer | None:
            block = by_module.get(id(linear))
            return None if block is None else StreamedLayer(parent, linear, self, block)

        layers = find_layers(root, plan, make=make, is_frozen=True)
        if layers:
            self.cache = ModulationCache(
                layers,
                limit_bytes=self.stored_limit_bytes,
                open_scope=contextlib.nullcontext,
                device=self._pool.device,
                open_probe=open_probe,
                expect=self._expect,
            )

    @property
    def nbytes(self) -> int:
        """Bytes of all layers."""
        return sum(block.master.nbytes for block in self.blocks)

    @property
    def stored_limit_bytes(self) -> int:
        """The most that outputs may take."""
        row_bytes = 0
        for block in self.blocks:
            linear: Any = block.plan.module
            row_bytes += linear.out_features * max(2, linear.weight.dtype.itemsize)
        return _NUM_STORED_ROWS * row_bytes

    @property
    def least_bytes(self) -> int:
        """Target memory when they stream: the buffers and the outputs."""
        return self._buffers.needed_bytes + self.stored_limit_bytes

    @property
    def target_bytes(self) -> int:
        """Target memory held now."""
        held = sum(block.held_bytes for block in self.blocks)
        return held + self._buffers.nbytes + (self.cache.stored_bytes if self.cache is not None else 0)

    def settle(self, *, is_resident: bool) -> None:
        """Take the memory for all layers, or for two of them at a time.

        Raises:
            torch.OutOfMemoryError: If there is none; what was taken is given back.
        """
        if not self.blocks:
            return
        if not is_resident:
            if self.is_resident:
                self._drop_residents()
            self._buffers.open()
        elif not self.is_resident:
            self.release()
            try:
                for block in self.blocks:
                    block.keep(block.master.nbytes, self._pool.transfer)
            except BaseException:
                self._drop_residents()
                raise
        self.is_resident = is_resident
        if self.cache is not None:
            self.cache.is_active = not is_resident

    def shrink(self) -> int:
        """Let the layers stream if they are resident; returns the bytes that this frees in the end."""
        if not self.is_resident:
            return 0
        before = self.target_bytes
        self.settle(is_resident=False)
        return before - self.least_bytes

    @contextlib.contextmanager
    def noticing_changes(self) -> Iterator[None]:
        """Forget every output if the layers' weights are changed in another way afterwards."""
        before = [_change_keys(block) for block in self.blocks]
        yield
        if self.cache is not None and before != [_change_keys(block) for block in self.blocks]:
            self.cache.clear()

    def release(self) -> None:
        """Give all target memory back."""
        self._buffers.close()
        self._drop_residents()
        if self.cache is not None:
            self.cache.clear()

    def install(self) -> None:
        """Put the hooks on."""
        if self.cache is not None:
            self.cache.install()  # first: a layer whose output is known is not brought in
        for block in self.blocks:
            install_hook(block.plan.module, _HOOK_NAME, _AsideHook(self, block))

    def remove(self) -> None:
        """Take them off."""
        if self.cache is not None:
            self.cache.remove()
        for block in self.blocks:
            remove_hook(block.plan.module, _HOOK_NAME)

    @contextlib.contextmanager
    def using(self, block: StreamBlock) -> Iterator[None]:
        """Have a layer's tensors on the target; whatever ends its forward, they return."""
        block.depth += 1
        goes_on = False
        try:
            if block.depth == 1:
                self._enter(block)
            yield
            goes_on = True
        finally:
            block.depth -= 1
            if block.depth == 0 and block.rest is not None:
                block.unbind_rest()
                self._buffers.give_back(block, goes_on=goes_on)

    def _enter(self, block: StreamBlock) -> None:
        begin = None if block.is_bound else self._clock.now()
        self._buffers.take(block)
        block.fill(self._pool)
        block.bind(self._pool.transfer)
        if begin is not None:
            self._clock.waited(begin, self._clock.now())
        block.apply_changes(self._pool)

    def _expect(self, layers: Sequence[CachedLayer]) -> None:
        wanted = {id(layer.linear) for layer in layers}
        self._buffers.expect([block for block in self.blocks if id(block.plan.module) in wanted])

    def _drop_residents(self) -> None:
        self.is_resident = False
        for block in self.blocks:
            block.release(self._pool.transfer)


class StreamedLayer(CachedLayer):
    """A modulation layer of a streamed model.

    Args:
        parent: The module whose argument decides its input.
        linear: The Linear.
        asides: Brings it in.
        block: Its bytes.
    """

    def __init__(
        self, parent: nn.Module, linear: nn.Module, asides: StreamAsides, block: StreamBlock
    ) -> None:
        super().__init__(parent, linear)
        self._asides = asides
        self._block = block

    @override
    def held(self) -> AbstractContextManager[Any]:
        return self._asides.using(self._block)

    @override
    def weights_state(self) -> tuple:
        return _change_keys(self._block)


def _change_keys(block: StreamBlock) -> tuple:
    return tuple((path, change.key) for path, change in block.changes.items())


class _AsideHook(ModuleHook):
    def __init__(self, asides: StreamAsides, block: StreamBlock) -> None:
        self._asides = weakref.ref(asides)
        self._block = block

    @override
    def run(self, forward: Forward, module: nn.Module, args: tuple, kwargs: dict) -> Any:
        asides = self._asides()
        if asides is None or self._block.depth:
            return forward(*args, **kwargs)
        with asides.using(self._block):
            return forward(*args, **kwargs)
