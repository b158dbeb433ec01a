"""CFG parallel: conditionings that one GPU would evaluate in turn go to different worker branches.

Guidance itself is combined in ComfyUI's own loop, so every variant of it (CFG, dual CFG, rescaling,
CFG++) stays exact. Source of the method: vLLM-Omni's CFG-Parallel; here the unit is one conditioning
of ``calc_cond_batch``, which also covers negatives of another length.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from typing import Any

import torch

from .parallel_run import ParallelRun


class BranchWrapper:
    """A CALC_COND_BATCH wrapper that runs each conditioning in a thread of its own."""

    def __init__(self, run: ParallelRun) -> None:
        self.run = run

    def __call__(
        self,
        executor: Callable,
        model: Any,
        conds: list,
        x_in: torch.Tensor,
        timestep: Any,
        model_options: dict,
    ) -> list[torch.Tensor]:
        """Same arguments and result as ComfyUI's ``_calc_cond_batch``.

        Args:
            executor: ComfyUI's own implementation.
            model: The ``BaseModel``.
            conds: One list of conditionings (or None) for each of positive, negative, ...
            x_in: Noisy latent ``[B, C, ...]``.
            timestep: Sigmas ``[B]``.
            model_options: ComfyUI's options.
        """
        active = [index for index, cond in enumerate(conds) if cond]
        if len(active) < 2:
            return executor(model, conds, x_in, timestep, model_options)
        outputs: list[torch.Tensor | None] = [None] * len(conds)
        errors: list[BaseException] = []
        # inference_mode is per thread, so a thread takes over the caller's.
        inference = torch.is_inference_mode_enabled()

        def evaluate(index: int) -> None:
            only = [cond if position == index else None for position, cond in enumerate(conds)]
            try:
                with torch.inference_mode(inference), self.run.turn():
                    outputs[index] = executor(model, only, x_in, timestep, model_options)[index]
            except BaseException as error:  # noqa: BLE001 - handed to the caller's thread below
                errors.append(error)

        threads = [_start(evaluate, index) for index in active]
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return [torch.zeros_like(x_in) if output is None else output for output in outputs]


def _start(function: Callable[[int], None], index: int) -> threading.Thread:
    context = contextvars.copy_context()
    thread = threading.Thread(target=context.run, args=(function, index), name=f"ferry-cfg-{index}")
    thread.start()
    return thread
