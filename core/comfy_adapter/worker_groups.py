"""The worker group of this ComfyUI process: started on first use, kept warm between prompts.

One group lives at a time, because a group owns its GPUs. Asking for other devices or degrees closes
the old group and starts a new one; a group whose worker died is dropped, so the next prompt starts
afresh.
"""

from __future__ import annotations

import itertools
import queue
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..errors import WorkerError
from ..log import get_logger
from ..parallel import ParallelDims, largest_rank_bytes
from ..plans import find_plan
from ..workers import WorkerPool
from .capacity import check_gpu_room, check_gpu_size, check_host
from .host_weights import HostWeights
from .model_export import class_path, describe_model
from .patch_messages import encode_patches
from .sent_tensors import SentTensors
from .worker_notices import loss_notice
from .worker_start import check_interrupt, start_pool

if TYPE_CHECKING:
    from .parallel_readout import ParallelReadout

# How soon a person hears that idle workers are gone.
_LOOK_EVERY_S = 1.0
_log = get_logger("workers")


@dataclass
class _Loaded:
    """A model that the workers hold."""

    patches_uuid: Any = None
    num_bytes: int = 0
    sent: dict[int, SentTensors] = field(default_factory=dict)  # by branch


@dataclass
class WorkerGroup:
    """Running workers and the models they hold."""

    dims: ParallelDims
    devices: tuple[str, ...]
    pool: WorkerPool
    loaded: dict[int, _Loaded] = field(default_factory=dict)

    def branch_ranks(self, branch: int) -> list[int]:
        """Return the ranks that evaluate one conditioning branch together; cfg is the outermost axis."""
        size = self.dims.world_size // self.dims.cfg
        return list(range(branch * size, (branch + 1) * size))

    def load(self, model: Any, patches: dict, patches_uuid: Any, *, force_cast: bool) -> None:
        """Give the workers ``model`` with ``patches``, sending only what they do not have yet."""
        token = _token(model)
        weights, changed = _share_weights(model)
        if changed:
            self.unload(token)
        if token not in self.loaded:
            self._send_model(token, model, weights)
        if self.loaded[token].patches_uuid == patches_uuid:
            return
        message = encode_patches(patches)
        payload = {"token": token, "patches": message, "force_cast": force_cast}
        applied = self.pool.call("patch", payload, poll=check_interrupt)
        if any(names != sorted(message) for names in applied.values()):
            raise WorkerError(f"the ranks applied different weight patches: {applied}")
        self.loaded[token].patches_uuid = patches_uuid

    def unload(self, token: int) -> None:
        """Drop a model from all workers."""
        loaded = self.loaded.pop(token, None)
        if loaded is not None and self.pool.alive:
            self.pool.call("unload", {"token": token})

    def loaded_bytes(self, token: int) -> int:
        """Return the bytes of weights that one worker holds for the model, 0 if none."""
        return self.loaded[token].num_bytes if token in self.loaded else 0

    def forward(
        self,
        branch: int,
        token: int,
        arguments: dict[str, Any],
        *,
        poll: Callable[[], None],
        readout: ParallelReadout | None = None,
    ) -> Any:
        """Run one denoiser call on a branch's ranks and return the first rank's output (on the CPU).

        Args:
            branch: Which ranks.
            token: The model.
            arguments: Of its innermost forward.
            poll: Called while waiting; what it raises ends the waiting.
            readout: Told what the call cost each rank.
        """
        ranks = self.branch_ranks(branch)
        sent = self.loaded[token].sent.setdefault(branch, SentTensors())
        packed = sent.pack(arguments)
        call = self.pool.submit("forward", {"token": token, **vars(packed)}, ranks=ranks)
        sent.commit()
        replies = call.wait(poll=poll)
        if readout is not None:
            readout.note(arguments, replies)
        return replies[ranks[0]]["output"]

    def end_sampling(self, token: int) -> None:
        """Keep a sampling's prompts and the like no longer."""
        if token in self.loaded:
            for sent in self.loaded[token].sent.values():
                sent.clear()

    def close(self) -> None:
        """Stop the workers."""
        self.pool.close()
        self.loaded.clear()

    def _send_model(self, token: int, model: Any, weights: HostWeights) -> None:
        description = describe_model(model)
        num_bytes = worker_bytes(model, self.dims)
        check_gpu_room(num_bytes, self.pool.call("free_memory", poll=check_interrupt), self.devices)
        self.loaded[token] = _Loaded(num_bytes=num_bytes)
        message = {"token": token, "description": description, "arena": weights.handle()}
        # If the user cancels, the workers still finish loading, and the next prompt finds it done.
        self.pool.call("load", message, poll=check_interrupt)


def worker_bytes(model: Any, dims: ParallelDims) -> int:
    """Return the bytes of a ``BaseModel``'s weights that the fullest worker holds."""
    module = model.diffusion_model
    return largest_rank_bytes(module, find_plan(class_path(module)), dims.tp)


def _share_weights(model: Any) -> tuple[HostWeights, bool]:
    """Return the model's shared weights, and whether they differ from those that workers may hold."""
    module, weights = model.diffusion_model, _weights.get(model)
    changed = None if weights is None else weights.refresh(module)
    if weights is None or changed is None:
        _weights[model] = weights = HostWeights(module)
    return weights, changed is not False


_current: WorkerGroup | None = None
_lost_because: str | None = None
# They outlive a group: other degrees, or new workers after a fault, find the weights in place.
_weights: weakref.WeakKeyDictionary[Any, HostWeights] = weakref.WeakKeyDictionary()
_numbers = itertools.count(1)
_tokens: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
# Filled by finalizers, which may run at any point of any thread: only a SimpleQueue may be used there.
_dead_tokens: queue.SimpleQueue[int] = queue.SimpleQueue()
_unloader: threading.Thread | None = None
_lock = threading.RLock()


def acquire_group(dims: ParallelDims, devices: tuple[str, ...]) -> WorkerGroup:
    """Return the running group of these degrees and devices, starting it if need be.

    Raises:
        WorkerError: If a worker does not start; then none is left running.
    """
    global _current, _lost_because, _unloader
    with _lock:
        if _current is not None and not _matches(_current, dims, devices):
            _close_group()
        if _current is None:
            pool = start_pool(dims, devices, again=_lost_because is not None)
            _current, _lost_because = WorkerGroup(dims, devices, pool), None
        if _unloader is None:
            _unloader = threading.Thread(target=_unload_dead_models, name="ferry-unload", daemon=True)
            _unloader.start()
        return _current


def check_room(model: Any, dims: ParallelDims, devices: tuple[str, ...]) -> None:
    """Refuse a model that host or GPUs cannot hold, before a worker is started for it.

    Raises:
        RequestError: With what is needed and what there is.
    """
    running = current_group(dims, devices) is not None
    check_host(model, devices, shared=model in _weights, running=running)
    check_gpu_size(worker_bytes(model, dims), devices)


def current_group(dims: ParallelDims, devices: tuple[str, ...]) -> WorkerGroup | None:
    """Return the running group of these degrees and devices, or None."""
    with _lock:
        return _current if _current is not None and _matches(_current, dims, devices) else None


def close_workers() -> None:
    """Stop the running group, if any, and give every model its weights back in ordinary memory."""
    global _lost_because
    with _lock:
        _close_group()
        _lost_because = None
        for model, weights in list(_weights.items()):
            weights.give_back(model.diffusion_model)
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
    """Take a model out of the workers, whatever their degrees; return the bytes that each held."""
    with _lock:
        freed = loaded_bytes(token)
        if _current is not None:
            _current.unload(token)
        return freed


def model_token(model: Any) -> int:
    """Return the number by which workers know this model object."""
    return _token(model)


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
        except WorkerError as error:
            _log.error("a model that nobody uses any more could not be unloaded: %s", error)
            drop_dead_group()


def _token(model: Any) -> int:
    with _lock:
        if model not in _tokens:
            _tokens[model] = next(_numbers)
            weakref.finalize(model, _dead_tokens.put, _tokens[model]).atexit = False
        return _tokens[model]


def _matches(group: WorkerGroup, dims: ParallelDims, devices: tuple[str, ...]) -> bool:
    return group.pool.alive and group.dims == dims and group.devices == devices
