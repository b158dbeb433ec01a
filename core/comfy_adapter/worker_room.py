"""How much of a model each worker holds on its GPU: all of it, or as much as fits while the rest streams.

Decided in ComfyUI's process, before a weight is moved, from what the workers' GPUs have free. The picture
is the same either way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import comfy.model_management

from ..errors import RequestError
from ..log import get_logger
from ..offload import least_stream_bytes
from .worker_parts import WorkerPart

_log = get_logger("workers")
_GIB = 1 << 30


@dataclass(frozen=True)
class StreamRequest:
    """What was asked of the workers' VRAM.

    Attributes:
        vram_limit_bytes: Most VRAM for weights in each worker; None: whatever is free.
        prefetch_depth: Blocks on their way to the GPU while one computes.
    """

    vram_limit_bytes: int | None = None
    prefetch_depth: int = 1


@dataclass(frozen=True)
class ModelNeeds:
    """What the fullest worker needs for a model.

    Attributes:
        weight_bytes: VRAM for all of its weights.
        least_bytes: VRAM without which it cannot run even if the weights stream.
        compute_bytes: VRAM to leave free for one evaluation.
        request: What was asked.
    """

    weight_bytes: int
    least_bytes: int
    compute_bytes: int
    request: StreamRequest


def model_needs(part: WorkerPart, request: StreamRequest, *, compute_bytes: int) -> ModelNeeds:
    """Return what a module needs; only a denoiser's weights can stream.

    Args:
        part: The module.
        request: What was asked.
        compute_bytes: ComfyUI's estimate for one evaluation, 0 if it is not known yet.
    """
    least = part.num_bytes
    if part.kind == "denoiser":
        # Of a cut model an estimate: what is outside the blocks may be whole in every worker.
        least = min(least, least_stream_bytes(part.module, request.prefetch_depth) // part.dims.tp)
    room = max(compute_bytes, comfy.model_management.minimum_inference_memory())
    return ModelNeeds(part.num_bytes, least, int(room), request)


def weight_room(
    needs: ModelNeeds, free_bytes: Mapping[int, int | None], devices: Sequence[str]
) -> int | None:
    """Return the bytes of VRAM for weights in each worker if they must stream, None if all of them fit.

    Args:
        needs: Of the model.
        free_bytes: By rank, as the workers report it, weights of this model not counted; None on the CPU.
        devices: Device of each rank.

    Raises:
        RequestError: If a worker has too little for streaming; it names the GPU and the numbers.
    """
    room = needs.request.vram_limit_bytes
    where = "every worker"
    limit = "" if room is None else f"The VRAM budget is {_gib(room)}"
    for rank, free in free_bytes.items():
        if free is None:
            continue
        if room is None or free - needs.compute_bytes < room:
            room, where = free - needs.compute_bytes, devices[rank]
            limit = f"{_gib(free)} are free there, of which one evaluation takes {_gib(needs.compute_bytes)}"
    if room is None or room >= needs.weight_bytes:
        return None
    if room < needs.least_bytes:
        raise _too_large(needs, where, limit)
    _log.info(
        "%s of weights do not fit; each worker holds %s and streams the rest",
        _gib(needs.weight_bytes),
        _gib(room),
    )
    return room


def fits_as_before(before: ModelNeeds, now: ModelNeeds) -> bool:
    """Return whether a module that fitted whole with the needs ``before`` does so with those of ``now``."""
    limit = now.request.vram_limit_bytes
    return now.compute_bytes <= before.compute_bytes and (limit is None or limit >= now.weight_bytes)


def _too_large(needs: ModelNeeds, where: str, limit: str) -> RequestError:
    """Return the error for a model that cannot even stream."""
    return RequestError(
        f"a model with {_gib(needs.weight_bytes)} of weights on {where} was asked, which takes at least "
        f"{_gib(needs.least_bytes)} there while it streams",
        limit=limit,
        way_out="Raise tensor_parallel_degree or the VRAM budget, use an fp8 file, or free that GPU",
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.2f} GiB"
