"""Outputs of frozen modulation layers, computed ahead so that their weights are not streamed.

A diffusion transformer's modulation layers (AdaLN) see one vector for each picture: the embedded
timestep, with a pooled caption or a guidance scale in some models. Their outputs are tiny and known
as soon as the timestep is drawn, while their weights are a third of Qwen-Image's bytes. So the inputs
of the next steps are computed first (``precompute``), every such layer is streamed once for all of
them, and in the steps themselves it is not streamed at all.

Exact: an output is what the layer itself returned for exactly these input bytes, this shape, dtype
and device, under the same autocast, with weights that have not changed since. For anything else the
layer computes as usual. An adapter hooked around the layer still runs every time, on the cached
output. A layer is left alone while it trains itself or its input needs a gradient.

Limit: a write through ``.data`` leaves no trace, neither of a weight nor, on CUDA, of an input; call
``clear`` after one.

What this module does not do: it knows no model; which layers are such layers is the caller's data.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from ..errors import RequestError
from ..module_hooks import Forward, ModuleHook, install_hook, remove_hook
from .external_reads import active_reader
from .modulation_layers import CachedLayer, ModulationPlan, find_layers, is_observed, is_plain
from .modulation_store import InputKey, InputKeys, OutputStore

Scope = Callable[[], AbstractContextManager[None]]
HOOK_NAME = "modulation"
CALL_HOOK_NAME = "modulation_call"


class _Captured(BaseException):
    """Ends a call once the input of its modulation is known; models may catch ``Exception``."""

    def __init__(self, argument: Tensor) -> None:
        super().__init__()
        self.argument = argument


class _ThreadState(threading.local):
    """What one thread is doing."""

    def __init__(self) -> None:
        self.is_probing = False
        self.is_filling = False
        self.keys: dict[int, InputKey | Tensor | None] = {}  # a tensor: the key is to be read when needed


class ModulationCache:
    """Hooks on modulation layers, and what they returned.

    Args:
        layers: The layers; found and checked by ``modulation_layers.find_layers``.
        limit_bytes: The most that stored outputs may take on the target.
        open_scope: A context in which reading a weight brings it to the target.
        device: The target.
        open_probe: A context for calls that end at their first modulation layer; None: ``open_scope``.
        fills_on_miss: Compute all layers at once when the first of them meets an unknown input.

    Attributes:
        is_active: Whether layers may be served at all.
        generation: Changes whenever outputs that had been computed are forgotten as a whole.
    """

    def __init__(
        self,
        layers: Sequence[CachedLayer],
        *,
        limit_bytes: int,
        open_scope: Scope,
        device: torch.device,
        open_probe: Scope | None = None,
        fills_on_miss: bool = False,
    ) -> None:
        self.layers = tuple(layers)
        self._store = OutputStore(limit_bytes)
        self._keys = InputKeys(trusts_versions=device.type != "cpu")
        self._open_scope = open_scope
        self._open_probe = open_probe or open_scope
        self._fills_on_miss = fills_on_miss
        self._device = device
        self._thread = _ThreadState()
        self._hooked: list[tuple[nn.Module, str]] = []
        self.is_active = True
        self.generation = 0
        self.num_hits = 0
        self.num_misses = 0

    @property
    def stored_bytes(self) -> int:
        """Bytes of the stored outputs on the target."""
        return self._store.stored_bytes

    @property
    def limit_bytes(self) -> int:
        """The most that stored outputs may take."""
        return self._store.limit_bytes

    def install(self) -> None:
        """Hook the layers; to be called before the hooks that stream their weights are installed."""
        for parent in {id(layer.parent): layer.parent for layer in self.layers}.values():
            self._install(parent, CALL_HOOK_NAME, _CallHook(self))
        for layer in self.layers:
            self._install(layer.linear, HOOK_NAME, _LayerHook(self, layer))

    def remove(self) -> None:
        """Take the hooks off and forget every output."""
        for module, name in self._hooked:
            remove_hook(module, name)
        self._hooked.clear()
        self.clear()

    def clear(self) -> None:
        """Forget every output."""
        self._store.clear()
        self._keys.clear()
        self.generation += 1

    def begin_pass(self, *, trusts_objects: bool) -> None:
        """Note that a forward of the model begins.

        Args:
            trusts_objects: Until the next one, a tensor given to several layers keeps its content: nothing
                but the model's own code runs, and that does not write to it. Its bytes are then read once,
                also where no version of it tells.
        """
        self._keys.clear()
        self._keys.trusts_objects = trusts_objects

    def release_waiting(self) -> None:
        """Note that what was computed ahead and not used yet may be forgotten."""
        self._store.release_waiting()

    def precompute(self, calls: Iterable[Callable[[], Any]]) -> int:
        """Compute the modulation of coming calls, streaming every layer once for all of them.

        Each call is run as far as its first modulation layer, without gradients and without touching
        the random state; the layers then compute for what was found there. What does not fit beside
        outputs that still wait for their use is left for the next time.

        Args:
            calls: Forwards of the model, such as ``lambda: model(noisy, timestep, caption)``, in the
                order in which they will come.

        Returns:
            How many of the calls, from the first, are prepared.

        Raises:
            RequestError: If a call ends without reaching a modulation layer.
        """
        if not self.layers:
            return 0
        prepared: dict[InputKey, Tensor] = {}
        count = 0
        room_bytes = self._store.room_bytes
        with self._open_probe(), torch.no_grad():
            for index, call in enumerate(calls):
                argument = self._probe(call, index)
                key = self._keys.key(argument)
                if key is None:
                    break
                if key not in prepared and not self._store.is_waiting(key):
                    room_bytes -= sum(layer.output_bytes(argument) for layer in self.layers)
                    if room_bytes < 0:
                        break
                    prepared[key] = argument
                count = index + 1
        # Not inside the scope above: the order of copies learned there must not lead over to these.
        with self._open_scope(), torch.no_grad():
            self._fill(prepared)
        return count

    def call_parent(self, forward: Forward, parent: nn.Module, args: tuple, kwargs: dict) -> Any:
        """Call the module around a layer; if its one argument decides everything, remember it."""
        if not self.is_active:
            return forward(*args, **kwargs)
        key = None
        if len(args) == 1 and not kwargs and is_plain(args[0]):
            if self._thread.is_probing:
                raise _Captured(args[0].detach().clone())
            if active_reader() is not None:
                key = args[0]
            else:
                key = self._keys.key(args[0])
                if self._fills_on_miss and key is not None and not self._thread.is_filling:
                    self._fill_unknown(key, args[0])
        keys = self._thread.keys
        before, keys[id(parent)] = keys.get(id(parent)), key
        try:
            return forward(*args, **kwargs)
        finally:
            keys[id(parent)] = before

    def call_layer(self, layer: CachedLayer, forward: Forward, args: tuple, kwargs: dict) -> Any:
        """Return what the layer returns for this call, from the store if it is there."""
        key = self._thread.keys.get(id(layer.parent))
        if key is None or len(args) != 1 or kwargs or not layer.may_be_cached(args[0]):
            return forward(*args, **kwargs)
        reader = active_reader()
        if reader is not None and isinstance(key, Tensor):
            recorded = reader.read(key, lambda argument: self._output_for(argument, layer))
            return forward(*args, **kwargs) if recorded is None else recorded.clone()
        if is_observed() or isinstance(key, Tensor):
            return forward(*args, **kwargs)
        found = self._store.find(key, layer)
        if found is not None:
            if not self._thread.is_filling:
                self.num_hits += 1
                self._store.note_use(key)
            return found.clone()
        output = forward(*args, **kwargs)
        if not self._thread.is_filling:
            self.num_misses += 1
        if is_plain(output) and not output.requires_grad:
            self._store.put(key, layer, output)
        return output

    def _output_for(self, argument: Tensor, layer: CachedLayer) -> Tensor | None:
        """Return the stored output for an argument of the module around the layer; not to be written to."""
        key = self._keys.key(argument) if self.is_active else None
        found = None if key is None else self._store.find(key, layer)
        if key is not None and found is not None:
            self.num_hits += 1
            self._store.note_use(key)
        return found

    def _fill_unknown(self, key: InputKey, argument: Tensor) -> None:
        """Compute every layer for an input that nobody foresaw, if there is room for all outputs."""
        if self._store.is_known(key) or torch.is_grad_enabled() or is_observed():
            return
        needed_bytes = sum(layer.output_bytes(argument) for layer in self.layers)
        if needed_bytes <= self._store.room_bytes:
            self.num_misses += len(self.layers)
            self._fill({key: argument})
            self._store.note_use(key)

    def _install(self, module: nn.Module, name: str, hook: ModuleHook) -> None:
        install_hook(module, name, hook)
        self._hooked.append((module, name))

    def _probe(self, call: Callable[[], Any], index: int) -> Tensor:
        with torch.random.fork_rng([self._device] if self._device.type == "cuda" else []):
            self._thread.is_probing = True
            try:
                call()
            except _Captured as captured:
                return captured.argument
            finally:
                self._thread.is_probing = False
        raise RequestError(
            f"computing the modulation of call {index} ahead was asked",
            limit=f"It ended without calling one of the {len(self.layers)} modulation layers",
            way_out="Pass calls of the model that the OffloadTrainingManager is attached to",
        )

    def _fill(self, arguments: dict[InputKey, Tensor]) -> None:
        self._thread.is_filling = True
        try:
            for layer in self.layers:
                missing = [key for key in arguments if self._store.find(key, layer) is None]
                if not missing:
                    continue
                with self._open_scope(), layer.held():  # one copy of the weights for all inputs
                    for key in missing:
                        with key.autocast():
                            layer.parent(arguments[key])
        finally:
            self._thread.is_filling = False
        for key in arguments:
            self._store.await_use(key)


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


def make_cache(
    model: nn.Module, plan: ModulationPlan, open_scope: Scope, device: torch.device
) -> ModulationCache:
    """Return the cache of a model, not installed yet.

    Raises:
        RequestError: If the plan does not fit the model.
    """
    layers = find_layers(model, plan)
    return ModulationCache(layers, limit_bytes=plan.limit_bytes, open_scope=open_scope, device=device)
