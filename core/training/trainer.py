"""The training loop: read ``Training.run`` and ``Training._try_step`` from top to bottom.

It knows no ComfyUI: the denoiser is a ``DiffusionProcess``, everything that a host wants to do in
between (progress, interrupt, the offload engine's ``after_backward``) is a callback.

Everything random is a function of the seed and of the data position, and everything else that a step
depends on is in ``TrainingState``: a training that stopped and goes on gives bit for bit what it would
have given without the stop, on the same machine and software.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from ..errors import TrainingError
from .callbacks import Callbacks
from .config import TrainingConfig
from .data import Batch, SampleOrder, SampleSource, draw_batches, generator, seed_torch
from .lora import LoraAdapters
from .loss import LOSSES, DiffusionProcess, sample_losses
from .nan_guard import NanGuard, Trouble, find_layer
from .optimizer import gradient_norm, scale_gradients
from .shares import Helpers, MicroStep, add_gradients, check_first_losses, check_shares, share_out
from .state_file import TrainingState, check_continues
from .trained_weights import TrainedWeights

# Micro-steps among which the one of the largest samples is looked for.
_LOOKED_AHEAD = 1000


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
        helpers: Other devices that compute a part of each step.

    Attributes:
        weights: What a step changes.
        step: Optimizer steps done.
        losses: The mean loss of each.

    Raises:
        RequestError: If the optimizer cannot work where the adapters are, or steps cannot be shared out.
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
        helpers: Helpers | None = None,
    ) -> None:
        self._num_devices = 1 if helpers is None else 1 + helpers.count
        check_shares(config.accumulation_steps, num_devices=self._num_devices)
        self.process, self.samples = process, samples
        self.adapters = adapters
        self.config = config
        self.device = torch.device(device)
        self.callbacks = callbacks or Callbacks()
        self.network = network
        self.helpers = helpers
        self._helpers_checked = False
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

    def rehearse(self, passes: int) -> None:
        """Compute a micro-step of the largest samples a few times and keep nothing of it.

        For who measures what a pass takes before the first step.
        """
        numbers = range(self._attempt, self._attempt + min(len(self.samples), _LOOKED_AHEAD))
        largest = max(numbers, key=self._num_values)
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            for _ in range(passes):
                self.callbacks.run_passes(lambda: self._compute(range(largest, largest + 1)))
                self.weights.drop_gradients()

    def _num_values(self, micro_step: int) -> int:
        return sum(math.prod(self.samples[index].shape) for index in self._order.indices(micro_step))

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
        self._guard.passed(self.step, attempt=self._attempt - 1)
        self.weights.update(self.step)
        self.step += 1
        self.losses.append(loss)
        self.callbacks.after_step(self.step, loss)

    def _accumulate(self) -> tuple[float, Trouble | None]:
        """Add up the gradients of a step and return its mean loss, or what is wrong with it."""
        accumulation = self.config.accumulation_steps
        mine, *others = share_out(self._attempt * accumulation, accumulation, num_devices=self._num_devices)
        if self.helpers is None:
            return self.callbacks.run_passes(lambda: self._compute(mine))
        shares = [[MicroStep(number, self._batches(number)) for number in numbers] for numbers in others]
        self.helpers.start(self.adapters.named_parameters(), shares)
        expected = self._first_losses(shares)
        total, trouble = self.callbacks.run_passes(lambda: self._compute(mine))
        share = self.helpers.finish()
        trouble = trouble or share.trouble
        if trouble is None:
            check_first_losses(expected, share.losses)
            add_gradients(self.adapters.named_parameters(), share.gradients)
        return total + sum(sum(losses) for losses in share.losses), trouble

    def _compute(self, micro_steps: range) -> tuple[float, Trouble | None]:
        """Do these micro-steps here; return their part of the mean loss, or what is wrong with it."""
        total = 0.0
        for micro, micro_step in enumerate(micro_steps):
            self._micro = micro
            self.callbacks.before_micro_step()
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

    def _first_losses(self, shares: list[list[MicroStep]]) -> list[float]:
        """Return, once, what each helper should find first; nothing later."""
        if self._helpers_checked:
            return []
        self._helpers_checked = True
        first = [micro_steps[0] for micro_steps in shares]
        with torch.no_grad():
            return [self.callbacks.run_passes(lambda step=step: self._value(step)) for step in first]

    def _value(self, step: MicroStep) -> float:
        batches = enumerate(step.batches)
        return sum(float(self._loss(batch, (step.number, index))) for index, batch in batches)

    def coming_batches(self) -> Iterator[list[Batch]]:
        """Yield the batches of every micro-step here, from the present one on, if no step is skipped."""
        accumulation = self.config.accumulation_steps
        each = accumulation // self._num_devices
        attempts = range(self._attempt, self._attempt + self.config.steps - self.step)
        numbers = (attempt * accumulation + micro for attempt in attempts for micro in range(each))
        return (self._batches(number) for number in itertools.islice(numbers, self._micro, None))

    def _batches(self, micro_step: int) -> list[Batch]:
        chosen = [self.samples[index] for index in self._order.indices(micro_step)]
        return draw_batches(chosen, seed=self.config.seed, micro_step=micro_step)

    def _loss(self, batch: Batch, seed: tuple[int, int]) -> Tensor:
        """Return the batch's share of the step's mean loss, with its graph."""
        seed_torch(generator(self.config.seed, "torch", *seed).initial_seed(), self.device)
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

        If these weights work, two bad steps in a row go back to them.

        Args:
            identity: See ``TrainingState``.
        """
        self._guard.saved(weights := self.weights.state())
        return TrainingState(
            step=self.step,
            attempt=self._attempt,
            losses=list(self.losses),
            weights=weights,
            unused=list(self.adapters.unused),
            identity=dict(identity or {}),
        )

    def go_back(self) -> bool:
        """After an error inside an optimizer step, go to the last state kept; return whether there is one."""
        if self._guard.good is None:
            return False
        weights, self.step, self._attempt = self._guard.good
        self.weights.load(weights)
        del self.losses[self.step :]
        return True

    def load(self, state: TrainingState) -> None:
        """Go on from ``state``; its ``identity`` was checked before.

        Raises:
            RequestError: If its tensors are not those of this training, or it has all the steps.
        """
        check_continues(state, self.config)
        self.weights.check(state.weights)
        self.weights.load(state.weights)
        self._guard.saved(state.weights)
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
