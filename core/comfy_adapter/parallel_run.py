"""What one parallel MODEL and its clones share: degrees, devices, and the way to the workers."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterator
from typing import Any

import comfy.model_management

from ..errors import RequestError
from ..parallel import ParallelDims
from .worker_groups import WorkerGroup, acquire_group, current_group, model_token


class ParallelRun:
    """Sends denoiser calls to the branches of a worker group.

    Several threads may call ``forward`` at once, one per free branch. Everything else that they do is
    ComfyUI's single-threaded code, so they take turns (``turn``) and let go only while a call is away.
    """

    def __init__(self, dims: ParallelDims, devices: tuple[str, ...]) -> None:
        self.dims = dims
        self.devices = devices
        self.token: int | None = None
        self._turn = threading.Lock()
        self._holds_turn = threading.local()
        self._free_branches: queue.LifoQueue[int] = queue.LifoQueue()
        for branch in reversed(range(dims.cfg)):
            self._free_branches.put(branch)

    def load(self, model: Any, patches: dict, patches_uuid: Any) -> None:
        """Start the workers if need be and give them the model with these weight patches."""
        group = acquire_group(self.dims, self.devices)
        self.token = model_token(model)
        group.load(model, patches, patches_uuid)

    def unload(self) -> int:
        """Take the model out of the workers and return the bytes that each held."""
        group = current_group(self.dims, self.devices)
        if group is None or self.token is None:
            return 0
        freed = group.loaded_bytes(self.token)
        group.unload(self.token)
        return freed

    def loaded_bytes(self) -> int:
        """Return the bytes of weights that each worker holds now."""
        group = current_group(self.dims, self.devices)
        return 0 if group is None or self.token is None else group.loaded_bytes(self.token)

    def forward(self, arguments: dict[str, Any]) -> Any:
        """Run one denoiser call on a free branch; waits while checking ComfyUI's interrupt."""
        group = self._group()
        assert self.token is not None
        branch = self._free_branches.get()
        try:
            with self._turn_given_up():
                return group.forward(
                    branch,
                    self.token,
                    arguments,
                    poll=comfy.model_management.throw_exception_if_processing_interrupted,
                )
        except TypeError as error:
            raise RequestError(
                f"this model's call holds a value that cannot be sent to the workers: {error}",
                limit="Workers receive tensors, numbers, text and lists or dictionaries of them",
                way_out="Remove the node that adds it before the parallel node",
            ) from error
        finally:
            self._free_branches.put(branch)

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Hold ComfyUI's code for this thread, except while a call is away."""
        with self._turn:
            self._holds_turn.value = True
            try:
                yield
            finally:
                self._holds_turn.value = False

    @contextlib.contextmanager
    def _turn_given_up(self) -> Iterator[None]:
        if not getattr(self._holds_turn, "value", False):
            yield
            return
        self._turn.release()
        try:
            yield
        finally:
            self._turn.acquire()

    def _group(self) -> WorkerGroup:
        group = current_group(self.dims, self.devices)
        if group is None or self.token not in group.loaded:
            raise RequestError(
                "a parallel MODEL was called while its workers do not run",
                limit="ComfyUI loads it at the start of a sampling",
                way_out="Queue the prompt again",
            )
        return group
