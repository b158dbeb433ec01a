"""A worker's weights, streamed from the memory that all workers share; in the worker process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from ..offload import HostParts, HostPinning, ModelStreamer, StreamConfig, StreamPool, WeightChange


class WorkerStream:
    """Streams one rank's part of a model through some of its GPU's memory.

    The bytes stay in shared memory, which this process registers as pinned for as long as it streams.

    Args:
        module: The model, this rank's weights in host memory.
        device: Where it computes.
        shared: Tensors over the shared memory.
        parts: Those of the model that stand for parts of them.
        room_bytes: GPU memory for weights.
        prefetch_depth: Blocks on their way while one computes.
    """

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        shared: Iterable[torch.Tensor],
        *,
        parts: HostParts | None,
        room_bytes: int,
        prefetch_depth: int,
    ) -> None:
        self._pinned: list[torch.UntypedStorage] = []
        self._pinning = HostPinning() if device.type == "cuda" else None
        pool = StreamPool(device, StreamConfig(None, None, prefetch_depth))
        self._streamer = ModelStreamer(module, pool, borrows=True, parts=parts)
        storages = {storage.data_ptr(): storage for storage in (one.untyped_storage() for one in shared)}
        for storage in storages.values():
            # As a whole: a copy must not reach over the end of a registered piece.
            if self._pinning is not None and self._pinning.pin(storage.data_ptr(), storage.nbytes()):
                self._pinned.append(storage)
        self.fit(room_bytes)

    @property
    def held_bytes(self) -> int:
        """GPU memory that the weights take now."""
        return self._streamer.target_bytes

    def fit(self, room_bytes: int) -> None:
        """Take more or less GPU memory."""
        self._streamer.load(room_bytes)

    def set_changes(self, changes: Mapping[str, WeightChange]) -> None:
        """Say how weights differ from the shared ones from now on."""
        self._streamer.set_changes(changes)

    def run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return ``forward(*args, **kwargs)``, a pass of the model."""
        return self._streamer.run_pass(forward, *args, **kwargs)

    def close(self) -> None:
        """Give back the GPU memory and the registration; the model is of no use any more."""
        self._streamer.close()
        while self._pinned:
            storage = self._pinned.pop()
            assert self._pinning is not None
            self._pinning.unpin(storage.data_ptr(), storage.nbytes())
