"""CFG parallel: conditionings that one GPU would evaluate in turn go to different worker branches.

Guidance itself is combined in ComfyUI's own loop, so every variant of it (CFG, dual CFG, rescaling,
CFG++) stays exact. Source of the method: vLLM-Omni's CFG-Parallel; here the unit is one conditioning
of ``calc_cond_batch``, which also covers negatives of another length.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable
from typing import Any

import comfy.patcher_extension
import torch

from .parallel_run import ParallelRun
from .worker_start import check_interrupt


class BranchWrapper:
    """A CALC_COND_BATCH wrapper that runs each conditioning in a thread of its own."""

    def __init__(self, run: ParallelRun) -> None:
        self.run = run

    def __call__(
        self,
        executor: Any,
        model: Any,
        conds: list,
        x_in: torch.Tensor,
        timestep: Any,
        model_options: dict,
    ) -> list[torch.Tensor]:
        """Same arguments and result as ComfyUI's ``_calc_cond_batch``.

        Args:
            executor: ``WrapperExecutor`` of ComfyUI's own implementation, at this wrapper.
            model: The ``BaseModel``.
            conds: One list of conditionings (or None) for each of positive, negative, ...
            x_in: Noisy latent ``[B, C, ...]``.
            timestep: Sigmas ``[B]``.
            model_options: ComfyUI's options.
        """
        inner = executor.wrappers[executor.idx + 1 :]
        if inner:
            # Wrappers of other nodes (EasyCache) expect one call for all conditionings, so they go first.
            new_executor = comfy.patcher_extension.WrapperExecutor.new_executor
            return new_executor(executor.original, [*inner, self]).execute(
                model, conds, x_in, timestep, model_options
            )
        active = [index for index, cond in enumerate(conds) if cond]
        if len(active) < 2 or self.run.holds_turn:  # within a branch already: no second split
            return executor(model, conds, x_in, timestep, model_options)
        return self._evaluate_apart(executor, active, model, conds, x_in, timestep, model_options)

    def _evaluate_apart(
        self,
        executor: Callable,
        active: list[int],
        model: Any,
        conds: list,
        x_in: torch.Tensor,
        timestep: Any,
        model_options: dict,
    ) -> list[torch.Tensor]:
        outputs: list[torch.Tensor | None] = [None] * len(conds)
        errors: dict[int, BaseException] = {}
        branches = {index: _Branch() for index in active}
        stop = threading.Event()
        # inference_mode is per thread, so a thread takes over the caller's.
        inference = torch.is_inference_mode_enabled()

        def poll() -> None:
            check_interrupt()
            if stop.is_set():
                raise _StoppedError

        def evaluate(index: int) -> None:
            only = [cond if position == index else None for position, cond in enumerate(conds)]
            turn = self.run.turn(poll=poll, on_release=branches[index].away.set)
            try:
                with torch.inference_mode(inference), _same_device(x_in), turn:
                    outputs[index] = executor(model, only, x_in, timestep, model_options)[index]
            except BaseException as error:  # noqa: BLE001 - handed to the caller's thread below
                errors[index] = error
                stop.set()
            finally:
                branches[index].away.set()
                branches[index].over.set()

        started = []
        try:
            for index in active:
                if stop.is_set():
                    break
                _start(evaluate, index)
                started.append(branches[index])
                # One after the other, so that caches which look at the first conditioning (EasyCache)
                # decide the same in every run.
                branches[index].away.wait()
            _wait(started)
        except BaseException:  # Ctrl-C
            stop.set()
            _wait(started)
            raise
        causes = [error for _, error in sorted(errors.items()) if not isinstance(error, _StoppedError)]
        if causes:
            raise causes[0]
        return [torch.zeros_like(x_in) if output is None else output for output in outputs]


class _Branch:
    """What one conditioning's thread tells the caller's thread."""

    def __init__(self) -> None:
        self.away = threading.Event()
        self.over = threading.Event()


class _StoppedError(BaseException):
    """Another branch failed or was cancelled, so this one's result is not wanted."""


def _wait(branches: list[_Branch]) -> None:
    # Not Thread.join: after Ctrl-C in it, Python 3.11 takes a running thread for ended.
    for branch in branches:
        branch.over.wait()


def _same_device(tensor: torch.Tensor) -> contextlib.AbstractContextManager:
    """Make the tensor's GPU the current one, which is a setting of each thread."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


def _start(function: Callable[[int], None], index: int) -> None:
    context = contextvars.copy_context()
    threading.Thread(target=context.run, args=(function, index), name=f"ferry-cfg-{index}").start()
