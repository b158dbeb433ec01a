"""A training between its steps: progress, files, requests from outside, and what is kept if it ends early.

What this module does not do: it computes nothing of the training itself (``core.training``).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import comfy.utils
import folder_paths
import torch
from torch import Tensor

from ..errors import FerryError, SaveError
from ..log import get_logger
from ..offload import OffloadTrainingManager
from ..training import RecordedBlocks, Training, TrainingState
from .lora_files import save_lora, verify_lora
from .portable_lora import portable_lora
from .running_trainings import RunningTraining, TrainingProgress, show_text
from .training_preview import Previewer
from .training_request import SAVE_DTYPES, TrainingRequest
from .training_states import RunStates, states_folder

_LOG = get_logger("training")
PREFIX = "diffusion_model."
_SMOOTHING = 0.95  # of the averages shown; about the last twenty steps count


class TrainingSession:
    """What happens around the steps of one training.

    Args:
        model: The MODEL (``ModelPatcher``) it is trained on.
        request: What was asked.
        running: Where progress goes to and requests come from.
        identity: What has to stay the same for a resume, see ``TrainingState``.
        start: The state to go on from.
        manager: The offload engine, for its figures.
        recorded: The recordings of its blocks, for their memory.
        previewer: Makes pictures; None if nothing turns this model's latents into one.
    """

    def __init__(
        self,
        model: Any,
        request: TrainingRequest,
        *,
        running: RunningTraining,
        identity: Mapping[str, str],
        start: TrainingState | None,
        manager: OffloadTrainingManager | None,
        recorded: RecordedBlocks | None = None,
        previewer: Previewer | None = None,
    ) -> None:
        self.model = model
        self.request = request
        self.running = running
        self.identity = dict(identity)
        self.start = start
        self.manager = manager
        self.recorded = recorded
        self.previewer = previewer
        self.states = RunStates(request.saves.prefix, keep=request.saves.keep_states)
        self.progress = TrainingProgress(0, request.training.steps)
        self.training: Training | None = None
        self._bar = comfy.utils.ProgressBar(request.training.steps)
        self._step_began = 0.0

    def run(self, training: Training) -> None:
        """Run ``training`` to its end; if it breaks off, write what there is and pass the error on."""
        self.training = training
        if self.start is not None:
            training.load(self.start)
            _LOG.info("going on from step %d", training.step)
        self.progress = dataclasses.replace(self.progress, step=training.step)
        self._show_plan()
        self._step_began = time.perf_counter()
        try:
            training.run()
        except BaseException as error:
            self._keep(error)
            raise

    def _show_plan(self) -> None:
        """Say in one line what is trained how, what stays on the GPU, and what a step should cost."""
        self.progress = dataclasses.replace(self.progress, **self._memory())
        self.running.tell(self.progress, now=True)
        line = "; ".join(part for part in (self.request.plan, self.progress.plan) if part)
        if line:
            _LOG.info("%s", line)
            show_text(line, self.running.node_id)

    def after_step(self, step: int, loss: float) -> None:
        """Report a step, then do what is due and what was asked for."""
        self._measure(step, loss)
        training = self._running_training()
        asked = self.running.take()
        every = self.request.saves.every
        due = bool(every) and step % every == 0 and step < training.config.steps
        if "save" in asked and not self.request.saves.prefix:
            self.progress = dataclasses.replace(self.progress, message="not saved: save_prefix is empty")
        elif "save" in asked or due:
            self._try_save(lora="save" in asked)
        previews = self.request.previews.every
        if "preview" in asked or (previews and step % previews == 0):
            self.preview()
        if "stop" in asked:
            training.stop()
        self._tell(now=bool(asked))
        self._step_began = time.perf_counter()

    def after_skip(self, what: str) -> None:
        """Show that a step was skipped, or anything else that went wrong."""
        _LOG.warning("%s", what)
        self.progress = dataclasses.replace(self.progress, message=what)
        self.running.tell(self.progress, now=True)
        show_text(what, self.running.node_id)

    def preview(self) -> None:
        """Make a picture of what the LoRA does now; without memory or disk for it, say so and go on."""
        if self.previewer is None:
            self.progress = dataclasses.replace(self.progress, message="no preview: connect preview_vae")
            return
        try:
            preview = self.previewer.make(self._running_training())
            self.progress = dataclasses.replace(self.progress, preview=preview)
        except (torch.OutOfMemoryError, OSError) as error:
            why = f"{error}" if isinstance(error, OSError) else "out of memory"
            self.after_skip(f"no preview of step {self.progress.step}: {why}")
        if self.manager is not None:
            self.manager.after_backward()

    def lora(self) -> dict[str, Tensor]:
        """Return the LoRA so far under ComfyUI's names, in the dtype that was asked for."""
        training = self._running_training()
        with training.weights.final():
            return training.adapters.state_dict(prefix=PREFIX, dtype=SAVE_DTYPES[self.request.save_dtype])

    def save(self, *, lora: bool) -> None:
        """Write the state, and the LoRA too if asked, as they are now.

        Raises:
            SaveError: If a file could not be written.
        """
        training = self._running_training()
        if (path := self.states.save(training.state(self.identity))) is not None:
            self._note_save(path, training.step)
        if lora and self.request.saves.prefix:
            self._note_save(self.save_lora(self.lora(), steps=training.step), training.step)

    def close(self, tensors: Mapping[str, Tensor], state: TrainingState) -> Path | None:
        """Write what a training gave that ended by itself or by a stop, and return the LoRA's path.

        Args:
            tensors: Of ``lora()``.
            state: To go on from; written first, since whatever is wrong with the LoRA can then be mended.

        Raises:
            SaveError: If the LoRA is not sound, or something could not be written.
        """
        kept = unsaved = None
        try:
            kept = self.states.save(state)
        except SaveError as error:
            unsaved = error
        try:
            verify_lora(self.model, tensors)
            path = self.save_lora(tensors, steps=state.step) if self.request.saves.prefix else None
        except SaveError as error:
            if kept is None:
                raise
            raise SaveError(
                f"{error} The training itself is kept: resume_from "
                f"{kept.relative_to(states_folder()).as_posix()} with more steps than {state.step}."
            ) from error
        if unsaved is not None:
            raise unsaved
        return path

    def _try_save(self, *, lora: bool) -> None:
        """Save, or show why not and go on: a full disk must not end what only memory holds.

        What is saved when the training ends is not tried but has to succeed.
        """
        try:
            self.save(lora=lora)
        except SaveError as error:
            self.after_skip(f"not saved: {error}")

    def save_lora(self, tensors: Mapping[str, Tensor], *, steps: int) -> Path:
        """Write a LoRA file with what it was made from in its header, and return its path.

        Raises:
            SaveError: If it could not be written or ComfyUI's loader would not take all of it.
        """
        metadata = self.metadata(steps)
        named = portable_lora(self.model, tensors, algorithm=self.request.lora.algorithm)
        path = save_lora(self.model, named, prefix=self.request.saves.prefix, metadata=metadata)
        _LOG.info("saved %s", path)
        return path

    def metadata(self, steps: int) -> dict[str, str]:
        """Return the header of a LoRA file after ``steps`` steps."""
        config = self.request.training
        return {
            "format": "pt",
            "base_model": type(self.model.model).__name__,
            "algorithm": self.request.lora.algorithm,
            "rank": str(self.request.lora.rank),
            "alpha": str(self.request.lora.alpha),
            "steps": str(steps),
            "learning_rate": str(config.learning_rate),
            "optimizer": config.optimizer,
            "seed": str(config.seed),
            "noise_levels": f"{self.request.levels.lowest:g} to {self.request.levels.highest:g}",
            "base_hash": self.identity["base model"].split()[-1],
            "dataset_hash": self.identity["dataset"].split()[-1],
        }

    def _keep(self, error: BaseException) -> None:
        """Save after a cancel or an error, without hiding it."""
        training = self._running_training()
        begun = self.start.step if self.start is not None else 0
        if training.step <= begun or not self.request.saves.prefix:
            return
        try:
            if self.manager is not None:
                self.manager.after_backward()
            is_whole = training.weights.is_whole or training.go_back()
            if not is_whole or training.step <= begun:
                error.add_note(
                    "The error came inside an optimizer step, and there is no newer state to keep."
                )
                return
            self.save(lora=True)
        except (FerryError, MemoryError, torch.OutOfMemoryError) as unsaved:
            kept = self.progress.saved or "nothing"
            _LOG.error("the training could not be saved whole, %s is the last: %s", kept, unsaved)
            error.add_note(f"The training could not be saved whole, {kept} is the last: {unsaved}")
        else:
            error.add_note(f"The training is saved as of step {training.step}; go on with resume_from.")
            self._tell(now=True)

    def _measure(self, step: int, loss: float) -> None:
        seconds = _smooth(self.progress.seconds_per_step, time.perf_counter() - self._step_began)
        steps = self.request.training.steps
        values: dict[str, Any] = {
            "step": step,
            "loss": loss,
            "average_loss": _smooth(self.progress.average_loss, loss),
            "seconds_per_step": seconds,
            "seconds_left": (steps - step) * seconds,
        }
        self.progress = dataclasses.replace(self.progress, message="", **values)

    def _tell(self, *, now: bool = False) -> None:
        self.progress = progress = dataclasses.replace(self.progress, **self._memory())
        self.running.tell(progress, now=now or progress.step == progress.steps)
        self._bar.update_absolute(progress.step, progress.steps)
        show_text(progress.line(), self.running.node_id)

    def _memory(self) -> dict[str, Any]:
        values: dict[str, Any] = {}
        device = self.model.load_device
        if device.type == "cuda":
            recorded_bytes = self.recorded.pool_bytes if self.recorded is not None else 0
            values["gpu_bytes"] = torch.cuda.memory_allocated(device) + recorded_bytes
            values["gpu_peak_bytes"] = torch.cuda.max_memory_allocated(device) + recorded_bytes
            values["gpu_total_bytes"] = torch.cuda.get_device_properties(device).total_memory
        if self.manager is None:
            return values
        stats, plan = self.manager.stats(), self.manager.residency_plan
        values["pinned_bytes"] = stats.pinned_bytes
        if stats.last_step is not None and stats.last_step.step_s > 0:
            values["stalled_share"] = min(1.0, stats.last_step.stalled_s / stats.last_step.step_s)
        if plan is not None:
            passes = self.request.training.accumulation_steps // self.request.gpus
            values["predicted_seconds"] = passes * plan.prediction.step_s
            values["gpu_planned_bytes"] = plan.prediction.peak_bytes
            values["plan"] = plan.describe()
        return values

    def _note_save(self, path: Path, step: int) -> None:
        root = Path(folder_paths.get_output_directory()).resolve()
        name = path.resolve().relative_to(root).as_posix()
        self.progress = dataclasses.replace(self.progress, saved=name, saved_step=step)

    def _running_training(self) -> Training:
        assert self.training is not None, "run() was not called"
        return self.training


def _smooth(average: float | None, value: float) -> float:
    return value if average is None else _SMOOTHING * average + (1 - _SMOOTHING) * value
