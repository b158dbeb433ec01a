"""The training loop: read it from top to bottom.

It knows no ComfyUI: the denoiser is a ``DiffusionProcess``, everything that a host wants to do in
between (progress, interrupt, the offload engine's ``after_backward``) is a callback.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..errors import TrainingError
from .config import TrainingConfig
from .data import Batch, SampleOrder, SampleSource, draw_batches
from .lora import LoraAdapters
from .loss import LOSSES, DiffusionProcess, sample_losses
from .optimizer import build_optimizer, gradients_are_finite


def _nothing() -> None:
    return None


def _no_report(step: int, loss: float) -> None:
    return None


@dataclass(frozen=True)
class Callbacks:
    """What a host does during training; each may raise to stop it.

    Attributes:
        before_micro_step: Called before each forward and backward.
        after_backward: Called after each backward, before anything reads a gradient.
        after_step: Called with the number of finished optimizer steps and the last one's loss.
    """

    before_micro_step: Callable[[], None] = _nothing
    after_backward: Callable[[], None] = _nothing
    after_step: Callable[[int, float], None] = _no_report


def train(
    process: DiffusionProcess,
    samples: Sequence[SampleSource],
    adapters: LoraAdapters,
    config: TrainingConfig,
    *,
    device: torch.device | str,
    callbacks: Callbacks | None = None,
) -> list[float]:
    """Train the installed ``adapters`` and return the mean loss of every optimizer step.

    Args:
        process: The denoiser, with the adapters on it.
        samples: Latents with their conditions; a batch takes latents of one shape.
        adapters: What is trained; nothing else gets a gradient.
        config: Steps, batch size and so on.
        device: Where the batches are put.
        callbacks: See ``Callbacks``.

    Raises:
        TrainingError: If a loss or a gradient is not finite, or an adapter cannot learn.
    """
    callbacks = callbacks or Callbacks()
    buckets = [sample.shape for sample in samples]
    order = SampleOrder(buckets, batch_size=config.batch_size, seed=config.seed)
    optimizer = build_optimizer(config.optimizer, adapters.parameters(), learning_rate=config.learning_rate)
    losses: list[float] = []
    for step in range(config.steps):
        step_loss = 0.0
        for micro in range(config.accumulation_steps):
            callbacks.before_micro_step()
            micro_step = step * config.accumulation_steps + micro
            chosen = [samples[index] for index in order.indices(micro_step)]
            for batch in draw_batches(chosen, seed=config.seed, micro_step=micro_step):
                step_loss += _forward_backward(process, batch, config, device=device, step=step)
                callbacks.after_backward()
        if step == 0:
            adapters.check_first_gradients()
        if not gradients_are_finite(adapters.parameters()):
            raise TrainingError(_not_finite("a gradient", step, config))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(step_loss)
        callbacks.after_step(step + 1, step_loss)
    return losses


def _forward_backward(
    process: DiffusionProcess,
    batch: Batch,
    config: TrainingConfig,
    *,
    device: torch.device | str,
    step: int,
) -> float:
    """Add the batch's gradients and return its share of the step's mean loss."""
    per_sample = sample_losses(
        process,
        batch.clean.to(device),
        batch.conditions,
        noise=batch.noise.to(device),
        positions=batch.positions,
        loss=LOSSES[config.loss],
    )
    loss = per_sample.sum() / (config.batch_size * config.accumulation_steps)
    value = float(loss.detach())
    if not math.isfinite(value):
        raise TrainingError(_not_finite("the loss", step, config))
    if not loss.requires_grad:
        raise TrainingError(
            "no adapter had a part in the denoiser's output, so there is nothing to train. Check 'targets': "
            "the layers they name are not called."
        )
    loss.backward()
    return value


def _not_finite(what: str, step: int, config: TrainingConfig) -> str:
    return (
        f"{what} of step {step + 1} of {config.steps} is NaN or infinite (learning_rate="
        f"{config.learning_rate}). The adapters would be ruined, so training stops. Lower the learning rate, "
        "or compute in fp32 or bf16."
    )
