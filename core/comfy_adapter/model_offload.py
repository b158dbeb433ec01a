"""MODELs whose weights stream through a budget of VRAM: from a MODEL, or straight from a file."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import comfy.model_management
import comfy.model_patcher
import torch
from torch import nn

from ..errors import RequestError
from ..offload import MappedFile, ModelStreamer, StreamConfig, StreamPool, alias, point_at
from .diffusion_files import find_diffusion_model, open_diffusion_model
from .model_build import build_diffusion_model
from .model_stream import ModelStream
from .parallel_model import ParallelPatcher
from .sampled_modulation import SampledModulation, streamed_modulation
from .shared_regions import shared_reserve
from .stream_readout import StreamReadout
from .streamed_patcher import StreamedPatcher
from .trainable_model import plain_clone
from .user_settings import budget_gb


def offload_model(
    model: Any,
    *,
    vram_gb: float,
    prefetch_depth: int = 1,
    share_with: Any | None = None,
    node_id: str | None = None,
    caches_modulation: bool = True,
) -> StreamedPatcher:
    """Return a MODEL with the same weights and patches as ``model`` that streams them.

    The two share one copy of the weights in host memory and nothing else: ``model`` itself stays an
    ordinary MODEL.

    Args:
        model: A ComfyUI MODEL (``ModelPatcher``).
        vram_gb: Budget for weights in GB (2**30 bytes); 0: the user's setting if there is one, else whatever
            ComfyUI has free.
        prefetch_depth: How many blocks may be on their way while one computes.
        share_with: A MODEL that streams already; both then use its budget, slots and host memory, and
            ``vram_gb`` and ``prefetch_depth`` must be its.
        node_id: The node that shows the live read-out.
        caches_modulation: Whether modulation layers come in once for many steps, where a model has them.

    Raises:
        RequestError: If the model or the request is not supported.
    """
    vram_gb = budget_gb("vram", vram_gb)
    config = StreamConfig.from_request(vram_gb=vram_gb, ram_gb=0, prefetch_depth=prefetch_depth)
    _check_model(model)
    pool = choose_pool(model.load_device, config, share_with)
    if getattr(model, "is_dynamic", lambda: False)():
        return attach_stream(plain_clone(model), pool, node_id=node_id, caches_modulation=caches_modulation)
    _unload(model)
    shell, pairs = _shell(model.model)
    originals = {id(stand_in): original for original, stand_in in pairs}

    def follow(stand_in: torch.Tensor) -> None:
        # One copy in host memory. Weights that live elsewhere (--highvram) are left there.
        original = originals[id(stand_in)]
        if original.device.type == "cpu":
            point_at(original, stand_in)

    return attach_stream(
        _clone_onto(model, shell),
        pool,
        node_id=node_id,
        caches_modulation=caches_modulation,
        when_moved=follow,
    )


def load_offloaded(
    name: str,
    *,
    weight_dtype: str = "default",
    vram_gb: float = 0.0,
    ram_gb: float = 0.0,
    prefetch_depth: int = 1,
    share_with: Any | None = None,
    node_id: str | None = None,
) -> StreamedPatcher:
    """Return a streamed MODEL from a file; its weights go from there straight into host memory.

    Args:
        name: A name from ``diffusion_model_names``.
        weight_dtype: As in ComfyUI's Load Diffusion Model.
        vram_gb: As in ``offload_model``.
        ram_gb: Budget for host memory in GB (2**30 bytes); 0: the user's setting if there is one, else the
            whole model. Blocks above it are read from the file whenever they are copied.
        prefetch_depth: As in ``offload_model``.
        share_with: As in ``offload_model``.
        node_id: As in ``offload_model``.

    Raises:
        RequestError: If the file or the request is not supported; nothing is kept then.
    """
    vram_gb, ram_gb = budget_gb("vram", vram_gb), budget_gb("ram", ram_gb)
    config = StreamConfig.from_request(vram_gb=vram_gb, ram_gb=ram_gb, prefetch_depth=prefetch_depth)
    path = find_diffusion_model(name)
    pool = choose_pool(comfy.model_management.get_torch_device(), config, share_with)
    files, tensors, metadata = open_diffusion_model(path)
    patcher = build_diffusion_model(name, tensors, metadata, weight_dtype=weight_dtype)
    return attach_stream(patcher, pool, files=files, node_id=node_id)


def attach_stream(
    patcher: Any,
    pool: StreamPool,
    *,
    files: Sequence[MappedFile] = (),
    node_id: str | None = None,
    caches_modulation: bool = True,
    when_moved: Callable[[torch.Tensor], None] | None = None,
) -> StreamedPatcher:
    """Let a plain patcher's model stream; nobody else may use the model in other ways."""
    model = patcher.model
    streamer = ModelStreamer(
        model,
        pool,
        entry=model.diffusion_model,
        files=files,
        modulation=streamed_modulation(model, model.diffusion_model) if caches_modulation else None,
        when_moved=when_moved,
    )
    streamer.call_around_pass(
        before=SampledModulation(streamer, model) if caches_modulation else None,
        after=StreamReadout(streamer, node_id) if node_id is not None else None,
    )
    patcher.__class__ = StreamedPatcher
    stream = ModelStream(patcher.model, streamer)
    stream.publish(patcher.model)
    patcher.model.device = patcher.offload_device
    return patcher


def choose_pool(device: torch.device, config: StreamConfig, share_with: Any | None) -> StreamPool:
    """Return the pool of ``share_with``, or a new one.

    Raises:
        RequestError: If ``share_with`` does not stream, or streams with other settings.
    """
    if device.type not in ("cpu", "cuda"):
        raise RequestError(
            f"streaming to {device} was asked",
            limit="Weights stream to CUDA devices (and to the CPU, for trying out)",
            way_out="Use the stock loader on this device",
        )
    if share_with is None:
        return StreamPool(device, config, reserve=shared_reserve())
    stream = getattr(share_with, "stream", None)
    if stream is None:
        raise RequestError(
            "share_with is a MODEL that does not stream",
            limit="A budget can be shared among streamed models only",
            way_out="Connect the output of an offload node, or nothing",
        )
    pool = stream.streamer.pool
    if pool.config != config or pool.device != device:
        raise RequestError(
            f"{config} on {device} was asked for a model that shares the budget of another",
            limit=f"The other has {pool.config} on {pool.device}",
            way_out="Give both nodes the same budgets and prefetch_depth",
        )
    return pool


def _check_model(model: Any) -> None:
    if isinstance(model, (StreamedPatcher, ParallelPatcher)):
        state = "streams" if isinstance(model, StreamedPatcher) else "is parallel"
        raise RequestError(
            f"offloading of a MODEL that {state} already was asked",
            limit="One MODEL has one place for its weights",
            way_out="Keep one offload node, and put it before Parallel Model",
        )
    if not isinstance(getattr(getattr(model, "model", None), "diffusion_model", None), nn.Module):
        raise RequestError(
            f"offloading of a {type(getattr(model, 'model', model)).__name__} was asked",
            limit="Only MODELs with a diffusion model have blocks that stream",
            way_out="Connect the output of a diffusion model loader",
        )


def _unload(model: Any) -> None:
    """Bring the model's own weights to the host, unpatched, and out of ComfyUI's list."""
    loaded = comfy.model_management.current_loaded_models
    for entry in [entry for entry in loaded if entry.model is not None and entry.model.is_clone(model)]:
        loaded.remove(entry)
        entry.model_unload()


def _shell(base: Any) -> tuple[Any, list[tuple[torch.Tensor, torch.Tensor]]]:
    """Return a copy of a ``BaseModel`` over the same bytes, with each tensor and its stand-in.

    Of its own, because a plain patcher of the original moves and patches that module's tensors.
    """
    memo: dict[int, Any] = {}
    pairs = []
    for module in base.modules():
        for tensors in (module._parameters, module._buffers):
            for tensor in tensors.values():
                if tensor is not None and id(tensor) not in memo:
                    memo[id(tensor)] = alias(tensor)
                    pairs.append((tensor, memo[id(tensor)]))
    if hasattr(base, "current_patcher"):
        memo[id(base.current_patcher)] = None
    if hasattr(base, "model_config"):  # a description; it answers any attribute, so it cannot be copied
        memo[id(base.model_config)] = base.model_config
    return copy.deepcopy(base, memo), pairs


def _clone_onto(model: Any, base: Any) -> Any:
    """Return a clone of a patcher whose model is ``base``, with nothing left from the original's."""
    clone = model.clone()
    clone.__class__ = comfy.model_patcher.ModelPatcher
    clone.model = base
    clone.size = 0
    clone.parent = None
    clone.is_injected = False
    clone.backup, clone.object_patches_backup, clone.hook_backup = {}, {}, {}
    clone.cached_hook_patches, clone.current_hooks = {}, None
    clone.pinned = set()
    if hasattr(clone, "backup_buffers"):
        clone.backup_buffers = {}
    return clone
