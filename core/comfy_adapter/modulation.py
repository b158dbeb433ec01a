"""The modulation cache on ComfyUI's models: which layers, and what to compute ahead in a training."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from ..log import get_logger
from ..module_paths import has_modules
from ..offload import ModulationCache, ModulationLayers, ModulationPlan
from ..plans import find_modulation
from ..training import Batch
from .model_export import class_path
from .training import ComfyProcess

_LOG = get_logger("training")


def modulation_plan(denoiser: nn.Module, *, limit_mb: float) -> ModulationPlan | None:
    """Return what the offload engine may keep the outputs of, None if the model has no such layers.

    Args:
        denoiser: The diffusion model.
        limit_mb: Target memory for the outputs, in MB (2**20 bytes); 0 switches the cache off.
    """
    rules = find_modulation(class_path(denoiser)) if limit_mb else ()
    present = [ModulationLayers(*rule) for rule in rules if has_modules(denoiser, ".".join(rule))]
    return ModulationPlan(tuple(present), limit_mb=limit_mb) if present else None


class ModulationAhead:
    """Computes the modulation of the next micro-steps whenever what was computed is used up.

    Args:
        cache: Where the outputs are kept; its limit decides how many micro-steps fit.
        process: The denoiser that is being trained.
        coming: Returns the batches of the micro-steps from the present one on.
    """

    def __init__(
        self,
        cache: ModulationCache,
        process: ComfyProcess,
        coming: Callable[[], Iterable[list[Batch]]],
    ) -> None:
        self._cache = cache
        self._process = process
        self._coming = coming
        self._num_prepared = 0
        self._is_useful = bool(cache.layers)

    def before_micro_step(self) -> None:
        """Compute ahead if nothing is left of the last time."""
        if self._num_prepared:
            self._num_prepared -= 1
        elif self._is_useful:
            self._prepare()

    def _prepare(self) -> None:
        calls_of_micro_steps: list[int] = []

        def calls() -> Iterator[Callable[[], Any]]:
            for batches in self._coming():
                planned = [call for batch in batches for call in self._calls(batch)]
                calls_of_micro_steps.append(len(planned))
                yield from planned

        num_calls = self._cache.precompute(calls())
        num_micro_steps = 0
        for count in calls_of_micro_steps:
            num_calls -= count
            if num_calls < 0:
                break
            num_micro_steps += 1
        if num_micro_steps == 0:
            self._is_useful = False
            _LOG.info(
                "the modulation of one micro-step does not fit into %d bytes, so it is not computed ahead",
                self._cache.limit_bytes,
            )
        self._num_prepared = max(0, num_micro_steps - 1)

    def _calls(self, batch: Batch) -> list[Callable[[], Any]]:
        process = self._process
        with torch.no_grad():
            sigma = process.sigmas(batch.positions)
            clean, noise = batch.clean.to(process.device), batch.noise.to(process.device)
            noisy = process.add_noise(clean, noise, sigma)
            groups = process.groups(noisy, batch.conditions)
        return [functools.partial(process.run_group, group, noisy, sigma) for group in groups]
