"""The jobs a worker offers once it runs inside ComfyUI's code base.

Imported in the worker process only. ComfyUI's settings are put in place before any of its modules
that reads them at import (``comfy.model_management``, the attention choice).
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..parallel import ExchangeTimer, ParallelDims, RankLayout, build_mesh
from ..plans import find_plan
from ..workers import borrows_arguments
from .acceleration import Acceleration


def register(context: Any, arguments: Mapping[str, Any]) -> dict[str, Callable]:
    """Set ComfyUI up in this process and return the jobs by name.

    Args:
        context: The ``WorkerContext``: rank, device, ``open_arena``.
        arguments: ``model_export.comfyui_arguments`` of the parent.

    Returns:
        ``load``, ``fit``, ``patch``, ``forward``, ``call``, ``unload``, ``free_memory``.
    """
    set_up_comfyui(arguments, cpu=context.device.type == "cpu")
    models = _Models(context)
    jobs = (models.load, models.fit, models.patch, models.forward)
    jobs += (models.call, models.unload, models.free_memory)
    return {job.__name__: job for job in jobs}


class _Models:
    """The modules that this rank holds, by the parent's token."""

    def __init__(self, context: Any) -> None:
        self.context = context
        self.layouts: dict[ParallelDims, RankLayout] = {}
        self.models: dict[int, Any] = {}

    def load(
        self,
        token: int,
        kind: str,
        description: Mapping[str, Any],
        arenas: list[Any],
        dims: Mapping[str, int],
        stream: Mapping[str, int] | None = None,
    ) -> int | None:
        """Build the module; return the GPU memory of its weights if they stream, else None."""
        from .progress_marks import mark_progress
        from .worker_decoder import WorkerDecoder
        from .worker_encoder import WorkerEncoder
        from .worker_model import WorkerModel

        weights: dict[str, torch.Tensor] = {}
        for arena in arenas:
            weights |= self.context.open_arena(arena)
        place: dict[str, Any] = {"device": self.context.device, "layout": self._layout(ParallelDims(**dims))}
        place["progress"] = self.context.progress
        if kind == "denoiser":
            model = WorkerModel(description, weights, **place, stream=stream)
            mark_progress(model.module, find_plan(description["class_path"]), self.context.progress.mark)
        else:
            model = {"decoder": WorkerDecoder, "encoder": WorkerEncoder}[kind](description, weights, **place)
        self.models[token] = model
        return model.held_bytes

    def fit(self, token: int, room_bytes: int) -> int | None:
        """Give a streamed model more or less room; return what it takes then."""
        model = self.models[token]
        assert model.stream is not None
        model.stream.fit(room_bytes)
        return model.held_bytes

    def patch(self, token: int, patches: Mapping[str, Any], force_cast: bool, acceleration: str) -> list[str]:
        self.models[token].set_acceleration(Acceleration(acceleration))
        self.models[token].set_force_cast(force_cast)
        return self.models[token].apply_patches(patches)

    # The model copies them to where it computes, once.
    @borrows_arguments
    def forward(
        self, token: int, arguments: Mapping[str, Any], fresh: Mapping[str, torch.Tensor], forget: list[int]
    ) -> Any:
        model = self.models[token]
        start_s, timer = time.perf_counter(), ExchangeTimer()
        model.keep(fresh, forget)
        with timer.active():
            output = model.forward(arguments)
        spent = {"busy_s": time.perf_counter() - start_s, "waited_s": _waited_s(model.layout, timer)}
        # Every rank of the group holds the whole output; one copy back is enough.
        kept = output if model.layout.speaks else None
        return spent | {"memory_bytes": self._held_bytes(), "output": kept}

    def call(self, token: int, arguments: Mapping[str, Any]) -> Any:
        return self.models[token].call(arguments)

    def _layout(self, dims: ParallelDims) -> RankLayout:
        """Return this rank's place on the mesh of these degrees; collective the first time."""
        if dims not in self.layouts:
            self.layouts[dims] = build_mesh(dims)
        return self.layouts[dims]

    def _held_bytes(self) -> int | None:
        device = self.context.device
        return torch.cuda.memory_reserved(device) if device.type == "cuda" else None

    def free_memory(self, token: int = -1) -> int | None:
        """Return the free memory of this rank's GPU, streamed weights of a model counted as free."""
        if self.context.device.type == "cpu":
            return None
        torch.cuda.empty_cache()
        held = self.models[token].held_bytes if token in self.models else None
        return torch.cuda.mem_get_info(self.context.device)[0] + (held or 0)

    def unload(self, token: int) -> None:
        model = self.models.pop(token, None)
        if model is not None:
            model.close()
        del model
        if self.context.device.type == "cuda":
            torch.cuda.empty_cache()


def _waited_s(layout: RankLayout, timer: ExchangeTimer) -> float | None:
    """Return the seconds that a forward waited for other ranks; None if they could not be seen."""
    alone = layout.sequence_group is None and layout.tensor_group is None
    return 0.0 if alone else timer.seconds()


def set_up_comfyui(arguments: Mapping[str, Any], *, cpu: bool) -> None:
    """Put the parent's ComfyUI settings (``model_export.comfyui_arguments``) in place in this process."""
    logging.basicConfig(level=logging.INFO)
    import comfy.options

    sys.argv = [sys.argv[0], *arguments["argv"]]
    comfy.options.enable_args_parsing(bool(arguments["argv"]))
    from comfy.cli_args import args

    for name, value in arguments["values"].items():
        setattr(args, name, value)
    args.cpu = cpu
    args.cuda_malloc = False
    # Weights come from the arena; ComfyUI's own pinning would claim most of the RAM in every worker.
    args.disable_pinned_memory = True
    import comfy.model_management
