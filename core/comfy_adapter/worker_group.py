"""One group of running workers, and the modules that they hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ..errors import RequestError, WorkerError
from ..parallel import ParallelDims, batch_size, join_batch, split_batch
from ..workers import RankEngine
from .acceleration import Acceleration, check_streamed
from .host_weights import HostWeights
from .patch_messages import encode_patches
from .sent_tensors import SentTensors
from .worker_parts import WorkerPart
from .worker_room import ModelNeeds, fits_as_before, weight_room
from .worker_start import check_interrupt

if TYPE_CHECKING:
    from .parallel_readout import ParallelReadout


# Of a denoiser's arguments the one that holds no row for each sample.
_WHOLE = frozenset({"transformer_options"})
_UNKNOWN = object()


@dataclass
class _Loaded:
    """A module that the workers hold."""

    dims: ParallelDims
    patch_prefix: str
    num_bytes: int
    needs: ModelNeeds
    streams: bool = False
    compiles: bool = False
    version: Any = None
    # By conditioning branch and part of the batch.
    sent: dict[tuple[int, int], SentTensors] = field(default_factory=dict)


@dataclass
class WorkerGroup:
    """Running workers and the modules they hold."""

    devices: tuple[str, ...]
    pool: RankEngine
    ray_address: str = ""
    loaded: dict[int, _Loaded] = field(default_factory=dict)

    def load(self, token: int, part: WorkerPart, weights: HostWeights, needs: ModelNeeds) -> None:
        """Give the workers a module, if they do not have it yet, in the room that there is now.

        Args:
            token: Its number.
            part: The module; with other degrees than before, or where it must stream now and does not, it
                is loaded anew.
            weights: Its weights in shared memory.
            needs: What it needs of a worker's GPU.
        """
        loaded = self.loaded.get(token)
        if loaded is not None and (loaded.dims != part.dims or not self._still_fits(loaded, needs)):
            self.unload(token)
        if token not in self.loaded:
            self._send(token, part, weights, needs)
        elif self.loaded[token].streams:
            self._fit(token, needs)

    def patch(
        self, token: int, patches: dict, version: Any, *, force_cast: bool, acceleration: Acceleration
    ) -> None:
        """Give a loaded module these patches and no others; nothing else is sent again.

        Args:
            token: The module's number.
            patches: ``ModelPatcher.patches``.
            version: Changes whenever anything here does.
            force_cast: Cast weights to the input's dtype in every layer.
            acceleration: How the workers evaluate the model.

        Raises:
            RequestError: If weights that stream cannot be evaluated in this way.
        """
        loaded = self.loaded[token]
        if loaded.streams:
            check_streamed(acceleration)
        if loaded.version == version:
            return
        message = encode_patches(patches, prefix=loaded.patch_prefix)
        # If the user cancels, the workers still apply it, so the weights are not those of any version.
        loaded.version = _UNKNOWN
        loaded.compiles = acceleration.compiles
        settings = {"force_cast": force_cast, "acceleration": acceleration.value}
        payload = {"token": token, "patches": message, **settings}
        applied = self.pool.call("patch", payload, poll=check_interrupt, same_work=True)
        if any(names != sorted(message) for names in applied.values()):
            raise WorkerError(f"the ranks applied different weight patches: {applied}")
        loaded.version = version

    def unload(self, token: int) -> None:
        """Drop a module from all workers."""
        loaded = self.loaded.pop(token, None)
        if loaded is not None and self.pool.alive:
            self.pool.call("unload", {"token": token}, same_work=True)

    def loaded_bytes(self, token: int) -> int:
        """Return the bytes of weights that one worker holds for the module, 0 if none."""
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
        """Run one denoiser call on a branch's ranks and return its output (on the CPU).

        Args:
            branch: Which ranks; samples of a batch go to its groups, as many as the batch degree.
            token: The model.
            arguments: Of its innermost forward.
            poll: Called while waiting; what it raises ends the waiting.
            readout: Told what the call cost each rank.
        """
        loaded = self.loaded[token]
        groups = loaded.dims.sample_ranks(branch)
        parts = split_batch(arguments, len(groups), size=batch_size(arguments["x"]), whole=_WHOLE)
        calls = []
        for index, (ranks, part) in enumerate(zip(groups, parts, strict=False)):
            sent = loaded.sent.setdefault((branch, index), SentTensors())
            packed = sent.pack(part)
            place = (token, branch, index)
            alike = (*place, loaded.num_bytes, loaded.version, _shapes(part))
            payload = {"token": token, **vars(packed)}
            # A rank that finds compiled code, and one that has to compile, do not.
            even = not loaded.compiles
            how = {"alike": alike, "same_work": even, "leases_results": True}
            calls.append(self.pool.submit("forward", payload, ranks=ranks, **how))
            sent.commit()
        replies: dict[int, Any] = {}
        for call in calls:
            replies |= call.wait(poll=poll)
        if readout is not None:
            readout.note(arguments, replies)
        return join_batch([replies[ranks[0]]["output"] for ranks in groups[: len(calls)]])

    def call(self, token: int, arguments: dict[str, Any]) -> list[Any]:
        """Run one call of a decoder or an encoder on all ranks and return what each returned.

        Raises:
            RequestError: If the workers do not hold it; they would be lost over the call.
        """
        if token not in self.loaded:
            raise RequestError(
                "a parallel VAE or CLIP was called while the workers do not hold it",
                limit="ComfyUI loads it before each use",
                way_out="Queue the prompt again",
            )
        payload = {"token": token, "arguments": arguments}
        results = self.pool.call("call", payload, poll=check_interrupt, same_work=True)
        return [results[rank] for rank in self.pool.ranks]

    def end_sampling(self, token: int) -> None:
        """Keep a sampling's prompts and the like no longer."""
        if token in self.loaded:
            for sent in self.loaded[token].sent.values():
                sent.clear()

    def close(self) -> None:
        """Stop the workers."""
        self.pool.close()
        self.loaded.clear()

    def _send(self, token: int, part: WorkerPart, weights: HostWeights, needs: ModelNeeds) -> None:
        description = part.describe()
        free = self.pool.call("free_memory", poll=check_interrupt, same_work=True)
        room = weight_room(needs, free, self.pool.device_names)
        stream = (
            None if room is None else {"room_bytes": room, "prefetch_depth": needs.request.prefetch_depth}
        )
        message = {
            "token": token,
            "kind": part.kind,
            "description": description,
            "arenas": weights.handles(),
            "dims": asdict(part.dims),
            "stream": stream,
        }
        self.pool.send_ahead(message, poll=check_interrupt)
        call = self.pool.submit("load", message, same_work=True)
        streams = stream is not None
        self.loaded[token] = _Loaded(part.dims, part.patch_prefix, needs.weight_bytes, needs, streams)
        # If the user cancels, the workers still finish loading, and the next prompt finds it done.
        self._note_held(token, call.wait(poll=check_interrupt))

    def _still_fits(self, loaded: _Loaded, needs: ModelNeeds) -> bool:
        """Return whether a loaded module is held as it would be if it were loaded now."""
        if loaded.streams:
            return loaded.needs.request.prefetch_depth == needs.request.prefetch_depth
        if fits_as_before(loaded.needs, needs):
            return True
        free = self.pool.call("free_memory", poll=check_interrupt, same_work=True)
        free = {rank: None if room is None else room + loaded.num_bytes for rank, room in free.items()}
        if weight_room(needs, free, self.pool.device_names) is not None:
            return False
        loaded.needs = needs
        return True

    def _fit(self, token: int, needs: ModelNeeds) -> None:
        """Let a streamed model have what is free now; a larger picture leaves less."""
        free = self.pool.call("free_memory", {"token": token}, poll=check_interrupt, same_work=True)
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
