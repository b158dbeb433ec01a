"""One group of running workers, and the models that they hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ..errors import WorkerError
from ..parallel import ParallelDims, largest_rank_bytes
from ..plans import find_plan
from ..workers import RankEngine
from .acceleration import Acceleration
from .host_weights import HostWeights
from .model_export import class_path, describe_model
from .patch_messages import encode_patches
from .sent_tensors import SentTensors
from .worker_room import ModelNeeds, weight_room
from .worker_start import check_interrupt

if TYPE_CHECKING:
    from .parallel_readout import ParallelReadout


@dataclass
class _Loaded:
    """A model that the workers hold."""

    version: Any = None
    num_bytes: int = 0
    streams: bool = False
    sent: dict[int, SentTensors] = field(default_factory=dict)  # by branch


@dataclass
class WorkerGroup:
    """Running workers and the models they hold."""

    dims: ParallelDims
    devices: tuple[str, ...]
    pool: RankEngine
    ray_address: str = ""
    loaded: dict[int, _Loaded] = field(default_factory=dict)

    def branch_ranks(self, branch: int) -> list[int]:
        """Return the ranks that evaluate one conditioning branch together; cfg is the outermost axis."""
        size = self.dims.world_size // self.dims.cfg
        return list(range(branch * size, (branch + 1) * size))

    def load(self, token: int, model: Any, weights: HostWeights, needs: ModelNeeds) -> None:
        """Give the workers a model, if they do not have it yet, in the room that there is now.

        Args:
            token: Its number.
            model: The ``BaseModel``.
            weights: Its weights in shared memory.
            needs: What it needs of a worker's GPU.
        """
        if token not in self.loaded:
            self._send_model(token, model, weights, needs)
        elif self.loaded[token].streams:
            self._fit(token, needs)

    def patch(
        self, token: int, patches: dict, version: Any, *, force_cast: bool, acceleration: Acceleration
    ) -> None:
        """Give a loaded model these patches and no others; nothing else is sent again.

        Args:
            token: The model's number.
            patches: ``ModelPatcher.patches``.
            version: Changes whenever anything here does.
            force_cast: Cast weights to the input's dtype in every layer.
            acceleration: How the workers evaluate the model.
        """
        if self.loaded[token].version == version:
            return
        message = encode_patches(patches)
        settings = {"force_cast": force_cast, "acceleration": acceleration.value}
        payload = {"token": token, "patches": message, **settings}
        applied = self.pool.call("patch", payload, poll=check_interrupt)
        if any(names != sorted(message) for names in applied.values()):
            raise WorkerError(f"the ranks applied different weight patches: {applied}")
        self.loaded[token].version = version

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
        loaded = self.loaded[token]
        alike = (token, branch, loaded.num_bytes, loaded.version, _shapes(arguments))
        payload = {"token": token, **vars(packed)}
        call = self.pool.submit("forward", payload, ranks=ranks, alike=alike)
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

    def _send_model(self, token: int, model: Any, weights: HostWeights, needs: ModelNeeds) -> None:
        description = describe_model(model)
        free = self.pool.call("free_memory", poll=check_interrupt)
        room = weight_room(needs, free, self.pool.device_names)
        stream = (
            None if room is None else {"room_bytes": room, "prefetch_depth": needs.request.prefetch_depth}
        )
        message = {"token": token, "description": description, "arenas": weights.handles(), "stream": stream}
        self.pool.send_ahead(message, poll=check_interrupt)
        call = self.pool.submit("load", message)
        self.loaded[token] = _Loaded(num_bytes=needs.weight_bytes, streams=stream is not None)
        # If the user cancels, the workers still finish loading, and the next prompt finds it done.
        self._note_held(token, call.wait(poll=check_interrupt))

    def _fit(self, token: int, needs: ModelNeeds) -> None:
        """Let a streamed model have what is free now; a larger picture leaves less."""
        free = self.pool.call("free_memory", {"token": token}, poll=check_interrupt)
        room = weight_room(needs, free, self.pool.device_names)
        payload = {"token": token, "room_bytes": needs.weight_bytes if room is None else room}
        self._note_held(token, self.pool.call("fit", payload, poll=check_interrupt))

    def _note_held(self, token: int, held: dict[int, int | None]) -> None:
        streamed = [num_bytes for num_bytes in held.values() if num_bytes is not None]
        if streamed:
            self.loaded[token].num_bytes = max(streamed)


def _shapes(value: Any) -> Any:
    """Return what decides how long a call takes: the shapes of all tensors in it."""
    if isinstance(value, torch.Tensor):
        return (value.shape, value.dtype)
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return tuple(shapes for shapes in map(_shapes, value) if shapes is not None)
    return None


def worker_bytes(model: Any, dims: ParallelDims) -> int:
    """Return the bytes of a ``BaseModel``'s weights that the fullest worker holds."""
    module = model.diffusion_model
    return largest_rank_bytes(module, find_plan(class_path(module)), dims.tp)
