"""What one parallel MODEL and its clones share: degrees, devices, and the way to the workers."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

from ..errors import RequestError, WorkerError
from ..parallel import ParallelDims
from .acceleration import Acceleration
from .parallel_readout import ParallelReadout, num_evaluations
from .patch_arithmetic import patched_by_loading
from .worker_group import WorkerGroup
from .worker_groups import (
    acquire_group,
    check_room,
    current_group,
    drop_dead_group,
    load_part,
    lost_because,
    model_token,
)
from .worker_parts import denoiser_part
from .worker_room import StreamRequest
from .worker_start import check_interrupt


class ParallelRun:
    """Sends denoiser calls to the branches of a worker group.

    Several threads may call ``forward`` at once, one per free branch. Everything else that they do is
    ComfyUI's single-threaded code, so they take turns (``turn``) and let go only while a call is away.

    Args:
        dims: Degrees.
        devices: Device of each rank.
        node_id: The node that shows what the GPUs do, if any.
        request: What was asked of the workers' VRAM.
        ray_address: Of the cluster that runs them; "": this machine does.
        acceleration: How the workers evaluate the model.
    """

    def __init__(
        self,
        dims: ParallelDims,
        devices: tuple[str, ...],
        *,
        node_id: str | None = None,
        request: StreamRequest | None = None,
        ray_address: str = "",
        acceleration: Acceleration = Acceleration.NONE,
    ) -> None:
        self.dims = dims
        self.devices = devices
        self.acceleration = acceleration
        self.ray_address = ray_address
        self.request = request or StreamRequest()
        # ComfyUI's estimate for one evaluation of the sampling that begins; 0: not known.
        self.compute_bytes = 0
        self.token: int | None = None
        self.readout = ParallelReadout(dims, devices, node_id)
        self._turn = threading.Lock()
        self._mine = threading.local()
        self._free_branches: queue.LifoQueue[int] = queue.LifoQueue()
        for branch in reversed(range(dims.cfg)):
            self._free_branches.put(branch)

    @property
    def holds_turn(self) -> bool:
        """Whether the calling thread has the turn (is inside ``turn``)."""
        return hasattr(self._mine, "poll")

    def load(self, model: Any, patches: dict, patches_uuid: Any, *, force_cast: bool = False) -> None:
        """Start the workers if need be and give them the model with these weight patches.

        Args:
            model: The ``BaseModel``; its weights are in this process, unpatched.
            patches: ``ModelPatcher.patches``.
            patches_uuid: Changes whenever the patches or ``force_cast`` do.
            force_cast: Cast weights to the input's dtype in every layer (ModelComputeDtype).
        """
        part = denoiser_part(model, self.dims)
        needs = check_room(
            part,
            self.devices,
            request=self.request,
            compute_bytes=self.compute_bytes,
            ray_address=self.ray_address,
        )
        group = acquire_group(self.devices, self.ray_address, parts=[part])
        self.token = model_token(model)
        version = (patches_uuid, self.acceleration)
        load_part(
            group,
            part,
            patched_by_loading(model, patches),
            version,
            force_cast=force_cast,
            acceleration=self.acceleration,
            needs=needs,
        )
        self.readout.begin(model)

    def loaded_bytes(self) -> int:
        """Return the bytes of weights that each worker holds now."""
        group = current_group(self.devices, self.ray_address)
        return 0 if group is None or self.token is None else group.loaded_bytes(self.token)

    def end_sampling(self) -> None:
        """Let go of what was kept for one sampling."""
        group = current_group(self.devices, self.ray_address)
        if group is not None and self.token is not None:
            group.end_sampling(self.token)
            self.readout.end()

    def forward(self, arguments: dict[str, Any]) -> Any:
        """Run one denoiser call on a free branch; waits while checking ComfyUI's interrupt."""
        group = self._group()
        assert self.token is not None
        try:
            # A thread without a branch must not keep the turn: who has one needs it to come back.
            measured = self.readout.meter.call(num_evaluations(arguments))
            with self._turn_given_up() as poll, self._free_branch() as branch, measured:
                return group.forward(branch, self.token, arguments, poll=poll, readout=self.readout)
        except TypeError as error:
            raise RequestError(
                f"this model's call holds a value that cannot be sent to the workers: {error}",
                limit="Workers receive tensors, numbers, text and lists or dictionaries of them",
                way_out="Remove the node that adds it before the parallel node",
            ) from error
        except WorkerError:
            drop_dead_group()
            raise

    @contextlib.contextmanager
    def turn(self, *, poll: Callable[[], None], on_release: Callable[[], None]) -> Iterator[None]:
        """Hold ComfyUI's code for this thread, except while a call is away.

        Args:
            poll: Called while this thread waits for a call; what it raises ends the waiting.
            on_release: Called whenever the thread lets go, first with its first call.
        """
        with self._turn:
            self._mine.poll, self._mine.on_release = poll, on_release
            try:
                yield
            finally:
                self._mine.__dict__.clear()

    @contextlib.contextmanager
    def _turn_given_up(self) -> Iterator[Callable[[], None]]:
        if not self.holds_turn:
            yield check_interrupt
            return
        self._turn.release()
        self._mine.on_release()
        try:
            yield self._mine.poll
        finally:
            self._turn.acquire()

    @contextlib.contextmanager
    def _free_branch(self) -> Iterator[int]:
        branch = self._free_branches.get()
        try:
            yield branch
        finally:
            self._free_branches.put(branch)

    def _group(self) -> WorkerGroup:
        group = current_group(self.devices, self.ray_address)
        if group is None and (reason := lost_because()) is not None:
            raise WorkerError(f"the workers are gone: {reason} Queue the prompt again to start new ones.")
        loaded = None if group is None or self.token is None else group.loaded.get(self.token)
        if group is None or loaded is None or loaded.dims != self.dims:
            raise RequestError(
                "a parallel MODEL was called while its workers do not run",
                limit="ComfyUI loads it at the start of a sampling",
                way_out="Queue the prompt again",
            )
        return group
