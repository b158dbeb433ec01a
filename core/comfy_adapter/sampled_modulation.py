"""The modulation of a sampling's coming steps, computed ahead while a model's weights stream.

ComfyUI tells the model all sigmas of a sampling (``sample_sigmas``). At the first step, and again when
what was computed is used up, the model's own code is run for each coming sigma as far as its first
modulation layer; the layers then come in once for all of them. What is not foreseen (a sampler's step
between two sigmas) is computed for itself. Outputs are kept by the exact input, so a wrong guess here
costs time, never exactness.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..errors import RequestError
from ..log import get_logger
from ..offload import ModelStreamer, ModulationPlan
from .modulation import modulation_plan

_LOG = get_logger("offload")
# A smaller share of the weights is not worth the calls that find out the layers' inputs.
_LEAST_SHARE = 0.05
# What others run inside a model. It may count calls, and it may write to what the layers are given.
_FOREIGN = ("patches", "patches_replace", "wrappers", "callbacks")


def streamed_modulation(model: nn.Module, denoiser: nn.Module) -> ModulationPlan | None:
    """Return the modulation layers of a model that is going to stream, None if they are too few to matter."""
    plan = modulation_plan(denoiser, limit_mb=1.0)
    if plan is None:
        return None
    prefixes = tuple(rule.parent.partition(".")[0] for rule in plan.layers)
    names = {rule.parent.rpartition(".")[2] for rule in plan.layers}
    total = modulation = 0
    for name, tensor in model.named_parameters():
        nbytes = tensor.numel() * tensor.dtype.itemsize
        total += nbytes
        parts = name.split(".")
        if names.intersection(parts) and set(prefixes).intersection(parts):
            modulation += nbytes
    return plan if modulation >= _LEAST_SHARE * total else None


class SampledModulation:
    """Called before every forward of a streamed diffusion model.

    Args:
        streamer: Its streamer.
        model: The ``BaseModel``.
    """

    def __init__(self, streamer: ModelStreamer, model: Any) -> None:
        self._streamer = weakref.ref(streamer)
        self._model = weakref.ref(model)
        self._sigmas: torch.Tensor | None = None
        self._times: list[float] = []
        self._generation = -1
        self._prepared: dict[tuple, set[int]] = {}

    def __call__(self, forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> None:
        """Compute the modulation of this step and the coming ones, unless that is done."""
        streamer, model = self._streamer(), self._model()
        cache = streamer.modulation if streamer is not None else None
        options = kwargs.get("transformer_options") or {}
        if cache is None or model is None:
            return
        cache.begin_pass(trusts_objects=not any(options.get(name) for name in _FOREIGN))
        sigmas = options.get("sample_sigmas")
        timestep = args[1] if len(args) > 1 else None
        if not isinstance(sigmas, torch.Tensor) or not isinstance(timestep, torch.Tensor):
            return
        if sigmas is not self._sigmas or cache.generation != self._generation:
            self._begin_sampling(cache, model, sigmas)
        step = self._find_step(timestep)
        if step is None:
            return
        kind = (timestep.shape, *(tuple(options.get(name) or ()) for name in ("cond_or_uncond", "uuids")))
        prepared = self._prepared.setdefault(kind, set())
        if step in prepared:
            return
        coming = list(range(step, len(self._times)))
        foreign = {name: {} for name in _FOREIGN if name in options}
        calls = [self._call(forward, args, kwargs, timestep, options | foreign, index) for index in coming]
        try:
            count = cache.precompute(calls)
        except RequestError as error:
            _LOG.info("the modulation of this model is not computed ahead: %s", error)
            count = len(coming)
        prepared.update(coming[: max(1, count)])

    def _begin_sampling(self, cache: Any, model: Any, sigmas: torch.Tensor) -> None:
        self._sigmas, self._generation, self._prepared = sigmas, cache.generation, {}
        cache.release_waiting()
        # The last sigma is where the sampling ends; the model is not asked about it.
        self._times = model.model_sampling.timestep(sigmas[:-1]).float().tolist()

    def _find_step(self, timestep: torch.Tensor) -> int | None:
        found = set(timestep.flatten().tolist())
        if len(found) != 1:
            return None
        (time,) = found
        return self._times.index(time) if time in self._times else None

    def _call(
        self,
        forward: Callable[..., Any],
        args: tuple,
        kwargs: dict[str, Any],
        timestep: torch.Tensor,
        options: dict[str, Any],
        index: int,
    ) -> Callable[[], Any]:
        at_index = torch.full_like(timestep, self._times[index])
        return functools.partial(
            forward, args[0], at_index, *args[2:], **(kwargs | {"transformer_options": dict(options)})
        )
