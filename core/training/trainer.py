"""The training loop: read ``Training.run`` and ``Training._try_step`` from top to bottom.

It knows no ComfyUI: the denoiser is a ``DiffusionProcess``, everything that a host wants to do in
between (progress, interrupt, the offload engine's ``after_backward``) is a callback.

Everything random is a function of the seed and of the data position, and everything else that a step
depends on is in ``TrainingState``: a training that stopped and goes on gives bit for bit what it would
have given without the stop, on the same machine and software.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..errors import RequestError, TrainingError
from ..log import get_logger
from .config import TrainingConfig
from .data import Batch, SampleOrder, SampleSource, draw_batches, generator
from .lora import LoraAdapters
from .loss import LOSSES, DiffusionProcess, sample_losses
from .nan_guard import NanGuard, Trouble, find_layer
from .optimizer import gradient_norm, scale_gradients
from .state_file import TrainingState
from .trained_weights import TrainedWeights

_LOG = get_logger("training")


def _nothing() -> None:
    return None


def _no_report(step: int, loss: float) -> None:
    return None


def _log_skip(what: str) -> None:
    _LOG.warning("%s", what)


@dataclass(frozen=True)
class Callbacks:
    """What a host does during training; each may raise to stop it.

    Attributes:
        before_micro_step: Called before each forward and backward.
        after_backward: Called after each backward, before anything reads a gradient.
        after_step: Called with the number of finished optimizer steps and the last one's loss.
        after_skip: Called with a line that says why a step was skipped.
    """

    before_micro_step: Callable[[], None] = _nothing
    after_backward: Callable[[], None] = _nothing
    after_step: Callable[[int, float], None] = _no_report
    after_skip: Callable[[str], None] = _log_skip


class Training:
    """One training of installed adapters, from its first step or from a saved state.

    Args:
        process: The denoiser, with the adapters on it.
        samples: Latents with their conditions; a batch takes latents of one shape.
        adapters: What is trained; nothing else gets a gradient.
        config: Steps, batch size and so on.
        device: Where the batches are put.
        callbacks: See ``Callbacks``.
        network: The module behind ``process``, to name the layer in which a NaN begins.

    Attributes:
        weights: What a step changes.
        step: Optimizer steps done.
        losses: The mean loss of each.

    Raises:
        RequestError: If the optimizer cannot work where the adapters are.
    """

    def __init__(
        self,
        process: DiffusionProcess,
        samples: Sequence[SampleSource],
        adapters: LoraAdapters,
        config: TrainingConfig,
        *,
        device: torch.device | str,
        callbacks: Callbacks | None = None,
        network: nn.Module | None = None,
    ) -> None:
        self.process = process
        self.samples = samples
        self.adapters = adapters
        self.config = config
        self.device = torch.device(device)
        self.callbacks = callbacks or Callbacks()
        self.network = network
        self.step = 0
        self.losses: list[float] = []
        self._attempt = 0
        self._micro = 0
        self._stopped = False
        buckets = [sample.shape for sample in samples]
        self._order = SampleOrder(buckets, batch_size=config.batch_size, seed=config.seed)
        self.weights = TrainedWeights(adapters.named_parameters(), config)
        self._guard = NanGuard(self.weights.state, self.weights.load)

    def stop(self) -> None:
        """Let ``run`` return after the step that is running; may be called from another thread."""
        self._stopped = True

    def run(self) -> list[float]:
        """Train until ``config.steps`` are done or ``stop`` was called, and return all losses.

        Raises:
            TrainingError: If losses or gradients stay non-finite, or an adapter cannot learn.
        """
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            while self.step < self.config.steps and not self._stopped:
                self._try_step()
        return self.losses

    def _try_step(self) -> None:
        """Do one optimizer step, or skip it if something is not finite."""
        loss, trouble = self._accumulate()
        self._attempt += 1
        trouble = trouble or self._gradient_trouble()
        if trouble is not None:
            self.weights.drop_gradients()
            done = self._guard.failed(
                trouble,
                step=self.step,
                steps=self.config.steps,
                learning_rate=self.config.learning_rate,
            )
            self.callbacks.after_skip(done)
            return
        if self.step == 0:
            self.adapters.check_first_gradients()
        self._guard.passed(self.step)
        self.weights.update(self.step)
        self.step += 1
        self.losses.append(loss)
        self.callbacks.after_step(self.step, loss)

    def _accumulate(self) -> tuple[float, Trouble | None]:
        """Add up the gradients of a step and return its mean loss, or what is wrong with it."""
        total = 0.0
        for micro in range(self.config.accumulation_steps):
            self._micro = micro
            self.callbacks.before_micro_step()
            micro_step = self._attempt * self.config.accumulation_steps + micro
            for index, batch in enumerate(self._batches(micro_step)):
                seed = micro_step, index
                loss = self._loss(batch, seed)
                value = float(loss.detach())
                if not math.isfinite(value):
                    # Not kept: the graph holds the batch's activations.
                    del loss
                    self.callbacks.after_backward()
                    return total, Trouble("the loss", self._find_layer(batch, seed))
                loss.backward()
                self.callbacks.after_backward()
                total += value
        return total, None

    def coming_batches(self) -> Iterator[list[Batch]]:
        """Yield the batches of every micro-step from the present one on, as far as no step is skipped."""
        accumulation = self.config.accumulation_steps
        first = self._attempt * accumulation + self._micro
        last = (self._attempt + self.config.steps - self.step) * accumulation
        return (self._batches(micro_step) for micro_step in range(first, last))

    def _batches(self, micro_step: int) -> list[Batch]:
        chosen = [self.samples[index] for index in self._order.indices(micro_step)]
        return draw_batches(chosen, seed=self.config.seed, micro_step=micro_step)

    def _loss(self, batch: Batch, seed: tuple[int, int]) -> Tensor:
        """Return the batch's share of the step's mean loss, with its graph."""
        _seed_torch(generator(self.config.seed, "torch", *seed), self.device)
        per_sample = sample_losses(
            self.process,
            batch.clean.to(self.device),
            batch.conditions,
            noise=batch.noise.to(self.device),
            positions=batch.positions,
            loss=LOSSES[self.config.loss],
        )
        loss = per_sample.sum() / (self.config.batch_size * self.config.accumulation_steps)
        if not loss.requires_grad and torch.is_grad_enabled():
            raise TrainingError(
                "no adapter had a part in the denoiser's output, so there is nothing to train. Check "
                "'targets': the layers they name are not called."
            )
        return loss

    def _find_layer(self, batch: Batch, seed: tuple[int, int]) -> str:
        if self.network is None:
            return "a layer that is not known"
        return find_layer(self.network, lambda: self._loss(batch, seed))

    def _gradient_trouble(self) -> Trouble | None:
        """Check all gradients and bring them to the norm that was asked for."""
        parameters = list(self.adapters.parameters())
        norm = gradient_norm(parameters)
        if not math.isfinite(norm):
            # Backward runs from the output on, so the last adapter in model order met it first.
            return Trouble("a gradient", self.adapters.last_with_bad_gradient())
        limit = self.config.max_gradient_norm
        if limit and norm > limit:
            scale_gradients(parameters, limit / norm)
        return None

    def state(self, identity: dict[str, str] | None = None) -> TrainingState:
        """Return a copy of everything that the next step depends on, on the host.

        Args:
            identity: See ``TrainingState``.
        """
        return TrainingState(
            step=self.step,
            attempt=self._attempt,
            losses=list(self.losses),
            weights=self.weights.state(),
            unused=list(self.adapters.unused),
            identity=dict(identity or {}),
        )

    def load(self, state: TrainingState) -> None:
        """Go on from ``state``; its ``identity`` was checked before.

        Raises:
            RequestError: If its tensors are not those of this training, or it has all the steps.
        """
        if state.step >= self.config.steps:
            raise RequestError(
                f"steps={self.config.steps} was asked with a training state of step {state.step}",
                limit="'steps' counts all steps, those before the stop too, so nothing is left to do",
                way_out=f"Raise steps above {state.step}",
            )
        self.weights.check(state.weights)
        self.weights.load(state.weights)
        for path in state.unused:
            self.adapters.leave_out(path)
        self.step, self._attempt, self.losses = state.step, state.attempt, list(state.losses)


def train(
    process: DiffusionProcess,
    samples: Sequence[SampleSource],
    adapters: LoraAdapters,
    config: TrainingConfig,
    *,
    device: torch.device | str,
    callbacks: Callbacks | None = None,
) -> list[float]:
    """Train the installed ``adapters`` and return the mean loss of every optimizer step; see ``Training``."""
    return Training(process, samples, adapters, config, device=device, callbacks=callbacks).run()


def _seed_torch(random: torch.Generator, device: torch.device) -> None:
    """Make what a model draws from torch's own generators (dropout) a function of the seed too."""
    seed = random.initial_seed()
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.default_generators[index].manual_seed(seed)
