"""The live read-out of a parallel MODEL: what its GPUs do, as an event for the browser.

The real speed-up is told only where it was measured: the same model and picture size on one GPU (``gpus`` 1),
in this ComfyUI process. It is never estimated.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import torch

from ..parallel import ParallelDims
from .call_meter import CallMeter, Usage
from .devices import device_index
from .model_export import class_path
from .running_trainings import send_event

EVENT = "ferry.parallel"
_INTERVAL_S = 0.5
_MOST_KEPT = 256

_lock = threading.Lock()
_one_gpu_s: dict[tuple, float] = {}  # seconds an evaluation, by what was evaluated
# A forward that is recorded or compiled later tells its waits only in its first calls.
_exchange_shares: dict[tuple, float] = {}  # by what was evaluated and the degrees
_latest: dict[str, dict[str, Any]] = {}  # the last event of each node


class ParallelReadout:
    """Measures the calls of one parallel MODEL and tells the browsers, twice a second at most.

    Args:
        dims: Its degrees.
        devices: Device of each rank.
        node_id: The node that shows it; None: nobody does, and only the times of one GPU are kept.
    """

    def __init__(self, dims: ParallelDims, devices: tuple[str, ...], node_id: str | None) -> None:
        self.meter = CallMeter(dims.world_size)
        self._dims, self._devices, self._node_id = dims, devices, node_id
        self._model: tuple | None = None
        self._work: tuple | None = None
        self._told_s = float("-inf")
        self._has_news = False

    def begin(self, model: Any) -> None:
        """Start anew: ``model``, a ``BaseModel``, is about to be sampled."""
        module = model.diffusion_model
        parameter = next(iter(module.parameters()), None)
        config = getattr(getattr(model, "model_config", None), "unet_config", None)
        dtype = None if parameter is None else parameter.dtype
        self._model = (class_path(module), str(config), str(dtype), self._devices[0][:3])  # cpu, GPU, cluster
        self._has_news = False
        self.meter.begin()

    def note(self, arguments: Mapping[str, Any], replies: Mapping[int, Mapping[str, Any]]) -> None:
        """Take what the ranks of one call said, and tell it if it is time."""
        self.meter.note(replies)
        self._work = (self._model, _picture_shapes(arguments))
        self._has_news = True
        if time.monotonic() - self._told_s >= _INTERVAL_S:
            self._tell(running=True)

    def end(self) -> None:
        """Tell the sampling's last figures; with one GPU, keep its time to compare others with."""
        if self._has_news:
            self._has_news = False
            self._tell(running=False)

    def _tell(self, *, running: bool) -> None:
        self._told_s = time.monotonic()
        usage = self._with_known_share(self.meter.read())
        one_gpu_s = self._one_gpu_s(usage)
        if self._node_id is None:
            return
        event = readout_event(usage, one_gpu_s=one_gpu_s, devices=self._devices, dims=self._dims)
        event |= {"node_id": self._node_id, "running": running}
        with _lock:
            _latest.pop(self._node_id, None)
            _latest[self._node_id] = event
            _trim(_latest)
        send_event(EVENT, event)

    def _with_known_share(self, usage: Usage) -> Usage:
        key = (self._work, self._dims)
        with _lock:
            if usage.exchange_share is not None:
                _exchange_shares[key] = usage.exchange_share
                _trim(_exchange_shares)
            return replace(usage, exchange_share=_exchange_shares.get(key))

    def _one_gpu_s(self, usage: Usage) -> float | None:
        with _lock:
            if self._work is not None and self._dims.world_size == 1 and usage.evaluation_s is not None:
                _one_gpu_s[self._work] = usage.evaluation_s
                _trim(_one_gpu_s)
            return None if self._work is None else _one_gpu_s.get(self._work)


def readout_event(
    usage: Usage, *, one_gpu_s: float | None, devices: tuple[str, ...], dims: ParallelDims
) -> dict[str, Any]:
    """Return the event's data; times in seconds, shares from 0 to 1, None where not measured."""
    speed_up = None
    if one_gpu_s is not None and usage.evaluation_s is not None:
        speed_up = one_gpu_s / usage.evaluation_s
    return {
        "degrees": asdict(dims),
        "devices": [device_index(device, rank) for rank, device in enumerate(devices)],
        "ranks": [asdict(rank) for rank in usage.ranks],
        "evaluation_s": usage.evaluation_s,
        "exchange_share": usage.exchange_share,
        "one_gpu_s": one_gpu_s,
        "ideal_speed_up": dims.world_size,
        "speed_up": speed_up,
    }


def latest_readouts() -> list[dict[str, Any]]:
    """Return the last event of each node, for a page that was loaded meanwhile."""
    with _lock:
        return list(_latest.values())


def _picture_shapes(arguments: Mapping[str, Any]) -> tuple:
    """Return the sizes of a call's latents: the picture, and reference pictures. Prompts do not count."""
    shapes = []
    for name, value in sorted(arguments.items()):
        for tensor in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(tensor, torch.Tensor) and tensor.ndim >= 4:
                shapes.append((name, tuple(tensor.shape[1:])))
    return tuple(shapes)


def num_evaluations(arguments: Mapping[str, Any]) -> int:
    """Return how many evaluations one denoiser call makes: its batch size."""
    x = arguments["x"]
    return int((x[0] if isinstance(x, list) else x).shape[0])


def _trim(kept: dict) -> None:
    while len(kept) > _MOST_KEPT:
        del kept[next(iter(kept))]
