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
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import RequestError
from ..module_hooks import Forward
from .external_reads import active_reader
from .modulation_due import DueInputs
from .modulation_hooks import ModulationHooks
from .modulation_layers import CachedLayer, ModulationPlan, find_layers, is_observed, is_plain
from .modulation_probe import ModulationProbe
from .modulation_store import InputKey, InputKeys, OutputStore

Scope = Callable[[], AbstractContextManager[None]]


class _ThreadState(threading.local):
    """What one thread is doing."""

    def __init__(self) -> None:
        self.filling: InputKey | None = None  # the input that a layer is computing for, ahead
        self.keys: dict[int, InputKey | Tensor | None] = {}  # a tensor: the key is to be read when needed


class ModulationCache:
    """Hooks on modulation layers, and what they returned.

    Args:
        layers: The layers; found and checked by ``modulation_layers.find_layers``.
        limit_bytes: The most that stored outputs may take on the target.
        open_scope: A context in which reading a weight brings it to the target.
        device: The target.
        open_probe: A context for calls that end at their first modulation layer; None: ``open_scope``.
        expect: Called with the layers that are about to be called, in that order, to compute for all
            coming inputs. Each then does when the model calls it, and inputs that nobody foresaw come too.
            None: all compute at once, ahead.

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
        expect: Callable[[Sequence[CachedLayer]], None] | None = None,
    ) -> None:
        self.layers = tuple(layers)
        self._store = OutputStore(limit_bytes)
        self._keys = InputKeys(trusts_versions=device.type != "cpu")
        self._open_scope = open_scope
        self._open_probe = open_probe or open_scope
        self._expect = expect
        self._due = DueInputs()
        self._probe = ModulationProbe(device)
        self._hooks = ModulationHooks()
        self._thread = _ThreadState()
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
        self._hooks.install(self, self.layers)

    def remove(self) -> None:
        """Take the hooks off and forget every output."""
        self._hooks.remove()
        self.clear()

    def clear(self) -> None:
        """Forget every output."""
        self._store.clear()
        self._keys.clear()
        self._due.clear()
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
        """Note that what was computed ahead and not used yet may be forgotten, and nothing is due."""
        self._store.release_waiting()
        self._due.clear()

    def precompute(self, calls: Iterable[Callable[[], Any]]) -> int:
        """Compute the modulation of coming calls, streaming every layer once for all of them.

        Each call is run as far as its first modulation layer, without gradients and without touching
        the random state; the layers then compute for what was found there (or when they are called, see
        ``expect``). What does not fit beside outputs that still wait for their use is left for the next
        time.

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
                argument = self._find_argument(call, index)
                key = self._keys.key(argument)
                if key is None:
                    break
                if key not in prepared and not self._store.is_waiting(key):
                    room_bytes -= self._output_bytes(argument)
                    if room_bytes < 0:
                        break
                    prepared[key] = argument
                count = index + 1
        if self._expect is not None:
            self._postpone(prepared)
            return count
        # Not inside the scope above: the order of copies learned there must not lead over to these.
        with self._open_scope(), torch.no_grad():
            for layer in self.layers:
                self._compute(layer, prepared)
        for key in prepared:
            self._store.await_use(key)
        return count

    def call_parent(self, forward: Forward, parent: nn.Module, args: tuple, kwargs: dict) -> Any:
        """Call the module around a layer; if its one argument decides everything, remember it."""
        if not self.is_active:
            return forward(*args, **kwargs)
        # While a layer computes ahead it is known: to read it would be to wait for the queue every time.
        key: InputKey | Tensor | None = self._thread.filling
        if key is None and len(args) == 1 and not kwargs and is_plain(args[0]):
            self._probe.meet(args[0])
            if active_reader() is not None:
                key = args[0]
            else:
                key = self._keys.key(args[0])
                if self._expect is not None and key is not None:
                    self._meet_unknown(key, args[0])
        keys = self._thread.keys
        before, keys[id(parent)] = keys.get(id(parent)), key
        try:
            return forward(*args, **kwargs)
        finally:
            keys[id(parent)] = before

    def call_layer(self, layer: CachedLayer, forward: Forward, args: tuple, kwargs: dict) -> Any:
        """Return what the layer returns for this call, from the store if it is there."""
        key = self._thread.keys.get(id(layer.parent))
        filling = self._thread.filling
        if filling is not None and key is filling:
            output = forward(*args, **kwargs)
            return self._keep(filling, layer, output) if layer.may_be_cached(args[0]) else output
        if key is None or len(args) != 1 or kwargs or not layer.may_be_cached(args[0]):
            return forward(*args, **kwargs)
        reader = active_reader()
        if reader is not None and isinstance(key, Tensor):
            recorded = reader.read(key, lambda argument: self._output_for(argument, layer))
            return forward(*args, **kwargs) if recorded is None else recorded.clone()
        if is_observed() or isinstance(key, Tensor):
            return forward(*args, **kwargs)
        self._compute(layer, self._due.take(layer))
        found = self._store.find(key, layer)
        if found is not None:
            self.num_hits += 1
            self._store.note_use(key)
            return found.clone()
        output = forward(*args, **kwargs)
        self.num_misses += 1
        return self._keep(key, layer, output)

    def _keep(self, key: InputKey, layer: CachedLayer, output: Any) -> Any:
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

    def _output_bytes(self, argument: Tensor) -> int:
        return sum(layer.output_bytes(argument) for layer in self.layers)

    def _meet_unknown(self, key: InputKey, argument: Tensor) -> None:
        """Have every layer compute for an input that nobody foresaw, if there is room for all outputs."""
        if self._store.is_known(key) or torch.is_grad_enabled() or is_observed():
            return
        if self._output_bytes(argument) <= self._store.room_bytes:
            self.num_misses += len(self.layers)
            self._postpone({key: argument.detach().clone()})
            self._store.note_use(key)

    def _find_argument(self, call: Callable[[], Any], index: int) -> Tensor:
        argument = self._probe.run(call)
        if argument is not None:
            return argument
        raise RequestError(
            f"computing the modulation of call {index} ahead was asked",
            limit=f"It ended without calling one of the {len(self.layers)} modulation layers",
            way_out="Pass calls of the model that the OffloadTrainingManager is attached to",
        )

    def _postpone(self, arguments: Mapping[InputKey, Tensor]) -> None:
        """Have layers compute for inputs when they are called, and keep room for what they will return."""
        assert self._expect is not None
        for key, argument in arguments.items():
            self._store.await_use(key, self._output_bytes(argument))
        for layer in self.layers:
            self._due.add(layer, self._missing(layer, arguments))
        self._expect(self._due.waited_for(self.layers))

    def _missing(self, layer: CachedLayer, arguments: Mapping[InputKey, Tensor]) -> dict[InputKey, Tensor]:
        find = self._store.find
        return {key: argument for key, argument in arguments.items() if find(key, layer) is None}

    def _compute(self, layer: CachedLayer, arguments: Mapping[InputKey, Tensor]) -> None:
        """Have one layer compute for inputs, with one copy of its weights for all of them."""
        missing = self._missing(layer, arguments) if arguments else None
        if not missing:
            return
        try:
            with self._open_scope(), layer.held(), torch.no_grad():
                for key, argument in missing.items():
                    self._thread.filling = key
                    with key.autocast():
                        layer.parent(argument)
        finally:
            self._thread.filling = None


def make_cache(
    model: nn.Module, plan: ModulationPlan, open_scope: Scope, device: torch.device
) -> ModulationCache:
    """Return the cache of a model, not installed yet.

    Raises:
        RequestError: If the plan does not fit the model.
    """
    layers = find_layers(model, plan)
    return ModulationCache(layers, limit_bytes=plan.limit_bytes, open_scope=open_scope, device=device)
