"""The worker group of this ComfyUI process: started on first use, kept warm between prompts.

One group lives at a time, because a group owns its GPUs. Asking for other devices closes the old group and
starts a new one; other degrees only load the model anew. A group whose worker died is dropped, so the next
prompt starts afresh.
"""

from __future__ import annotations

import itertools
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from ..errors import WorkerError
from ..log import get_logger
from .acceleration import Acceleration
from .capacity import check_host, gpu_sizes
from .host_weights import HostWeights
from .worker_group import WorkerGroup
from .worker_notices import loss_notice
from .worker_parts import WorkerPart
from .worker_room import ModelNeeds, StreamRequest, model_needs, weight_room
from .worker_start import start_pool_while

# How soon a person hears that idle workers are gone.
_LOOK_EVERY_S = 1.0
_log = get_logger("workers")


def share_weights(part: WorkerPart) -> tuple[HostWeights, bool]:
    """Return the module's shared weights, and whether they differ from those that workers may hold."""
    weights = _weights.get(part.owner)
    changed = None if weights is None else weights.refresh(part.module)
    if weights is None or changed is None:
        _weights[part.owner] = weights = HostWeights(part.module)
        _modules[part.owner] = weakref.ref(part.module)
    return weights, changed is not False


_current: WorkerGroup | None = None
_lost_because: str | None = None
# They outlive a group: other degrees, or new workers after a fault, find the weights in place.
_weights: weakref.WeakKeyDictionary[Any, HostWeights] = weakref.WeakKeyDictionary()
_modules: weakref.WeakKeyDictionary[Any, Callable[[], Any]] = weakref.WeakKeyDictionary()
_numbers = itertools.count(1)
_tokens: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
# Filled by finalizers, which may run at any point of any thread: only a SimpleQueue may be used there.
_dead_tokens: queue.SimpleQueue[int] = queue.SimpleQueue()
_unloader: threading.Thread | None = None
_lock = threading.RLock()


def load_part(
    group: WorkerGroup,
    part: WorkerPart,
    patches: dict,
    version: Any,
    *,
    force_cast: bool = False,
    acceleration: Acceleration = Acceleration.NONE,
    needs: ModelNeeds,
) -> None:
    """Give a group a module with ``patches``, sending only what it does not have yet.

    Args:
        group: The workers.
        part: The module.
        patches: ``ModelPatcher.patches``.
        version: Changes whenever anything but the model does.
        force_cast: Cast weights to the input's dtype in every layer.
        acceleration: How the workers evaluate it.
        needs: What it needs of a worker's GPU.
    """
    token = model_token(part.owner)
    weights, changed = share_weights(part)
    if changed:
        group.unload(token)
    group.load(token, part, weights, needs)
    group.patch(token, patches, version, force_cast=force_cast, acceleration=acceleration)


def acquire_group(
    devices: tuple[str, ...], ray_address: str = "", *, parts: Sequence[WorkerPart] = ()
) -> WorkerGroup:
    """Return the running group of these devices and this cluster, starting it if need be.

    Args:
        devices: Device of each worker.
        ray_address: Of the cluster; "": this machine.
        parts: What they are to load: the weights are brought into shared memory while workers start.

    Raises:
        RequestError: If the cluster cannot run them.
        WorkerError: If a worker does not start; then none is left running.
    """
    global _current, _lost_because, _unloader
    with _lock:
        if _current is not None and not _matches(_current, devices, ray_address):
            _close_group()
        if _current is None:
            how = {"ray_address": ray_address, "again": _lost_because is not None}
            # A cluster may still refuse, so nothing is brought anywhere for it before.
            early = [] if ray_address else parts
            pool = start_pool_while(lambda: [share_weights(part) for part in early], devices, **how)
            _current, _lost_because = WorkerGroup(devices, pool, ray_address), None
        if _unloader is None:
            _unloader = threading.Thread(target=_unload_dead_models, name="ferry-unload", daemon=True)
            _unloader.start()
        return _current


def check_room(
    part: WorkerPart,
    devices: tuple[str, ...],
    *,
    request: StreamRequest | None = None,
    compute_bytes: int = 0,
    ray_address: str = "",
) -> ModelNeeds:
    """Refuse a module that host or GPUs cannot hold, before a worker is started for it.

    Args:
        part: The module.
        devices: Device of each worker.
        request: What was asked of the workers' VRAM; None: all that is free.
        compute_bytes: VRAM that one evaluation is estimated to take, 0 if that is not known.
        ray_address: Of the cluster that runs the workers; its nodes are asked once they are connected.

    Returns:
        What it needs of a worker's GPU.

    Raises:
        RequestError: With what is needed and what there is.
    """
    running = ray_address != "" or current_group(devices) is not None
    check_host(part.module, devices, shared=part.owner in _weights, running=running)
    needs = model_needs(part, request or StreamRequest(), compute_bytes=compute_bytes)
    weight_room(needs, gpu_sizes(devices), devices)
    return needs


def current_group(devices: tuple[str, ...], ray_address: str = "") -> WorkerGroup | None:
    """Return the running group of these devices and this cluster, or None."""
    with _lock:
        fits = _current is not None and _matches(_current, devices, ray_address)
        return _current if fits else None


def close_workers() -> None:
    """Stop the running group, if any, and give every model its weights back in ordinary memory."""
    global _lost_because
    with _lock:
        _close_group()
        _lost_because = None
        for owner, weights in list(_weights.items()):
            if (module := _modules[owner]()) is not None:
                weights.give_back(module)
        _weights.clear()


def drop_dead_group() -> None:
    """Free what a group still holds whose worker died."""
    global _lost_because
    with _lock:
        if _current is not None and not _current.pool.alive:
            pool = _current.pool
            _close_group()
            _lost_because = pool.ended_because or "a worker ended."
            loss_notice(_lost_because, pool.spec.num_ranks).send()


def lost_because() -> str | None:
    """Return why the last group was lost, in a sentence; None if it was not, or a new one runs."""
    with _lock:
        drop_dead_group()
        return None if _current is not None else _lost_because


def loaded_bytes(token: int) -> int:
    """Return the bytes of weights that each running worker holds for a model, 0 if none."""
    with _lock:
        drop_dead_group()
        return 0 if _current is None else _current.loaded_bytes(token)


def unload_model(token: int) -> int:
    """Take a model out of the workers, whatever their degrees; return the bytes that each held.

    Workers that are lost over it hold nothing any more, which is what was asked for.
    """
    with _lock:
        freed = loaded_bytes(token)
        if _current is not None:
            try:
                _current.unload(token)
            except WorkerError as error:
                _log.error("the workers were lost while a model was unloaded: %s", error)
                drop_dead_group()
        return freed


def model_token(owner: Any) -> int:
    """Return the number by which workers know this object's module."""
    with _lock:
        if owner not in _tokens:
            _tokens[owner] = next(_numbers)
            weakref.finalize(owner, _dead_tokens.put, _tokens[owner]).atexit = False
        return _tokens[owner]


def _close_group() -> None:
    global _current
    if _current is not None:
        _current.close()
        _current = None


def _unload_dead_models() -> None:
    """Free the memory of collected models, also if no parallel sampling follows, and notice lost workers."""
    while True:
        try:
            unload_model(_dead_tokens.get(timeout=_LOOK_EVERY_S))
        except queue.Empty:
            drop_dead_group()


def _matches(group: WorkerGroup, devices: tuple[str, ...], ray_address: str) -> bool:
    return group.pool.alive and (group.devices, group.ray_address) == (devices, ray_address)
