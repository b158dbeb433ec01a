"""Train a LoRA on a ComfyUI MODEL: what the node calls."""

from __future__ import annotations

import contextlib
import math
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import comfy.model_management
import torch
from torch import Tensor

from ..log import get_logger
from ..offload import OffloadTrainingManager
from ..training import (
    BlockCheckpointing,
    Callbacks,
    LoraAdapters,
    NoiseLevels,
    OutOfPlace,
    SampleSource,
    Target,
    Training,
    TrainingConfig,
    check_identity,
    check_managed_bytes,
    check_same_output,
    draw_batches,
    find_blocks,
    fingerprint,
    fingerprint_model,
    model_bytes,
    read_state,
    select_targets,
)
from ..training.dataset import TrainingCache
from .cached_samples import read_examples
from .lora_files import check_prefix, verify_lora
from .modulation import ModulationAhead, modulation_plan
from .running_trainings import RunningTraining, registered, show_text
from .trainable_model import COMPUTE_DTYPES, borrowed_model, check_trainable, training_dtype
from .training import ComfyProcess, check_noise_levels
from .training_preview import Previewer, PreviewInputs, can_show, check_preview
from .training_request import SAVE_DTYPES, PreviewSettings, SaveSettings, TrainingRequest
from .training_session import TrainingSession
from .training_states import find_state

_LOG = get_logger("training")
__all__ = [
    "COMPUTE_DTYPES",
    "PreviewInputs",
    "PreviewSettings",
    "SAVE_DTYPES",
    "SaveSettings",
    "TrainedLora",
    "TrainingRequest",
    "run_lora_training",
]


@dataclass(frozen=True)
class TrainedLora:
    """What a training gives.

    Attributes:
        lora: LORA_MODEL: host tensors under ComfyUI's names.
        loss_map: LOSS_MAP: ``{"loss": [...]}``, one per optimizer step.
        steps: Optimizer steps done.
        path: The saved file, None if none was asked for.
    """

    lora: dict[str, Tensor]
    loss_map: dict[str, list[float]]
    steps: int
    path: Path | None


def run_lora_training(
    model: Any,
    latents: Sequence[dict],
    positive: Sequence[list],
    request: TrainingRequest,
    *,
    data: TrainingCache | None = None,
    node_id: str | None = None,
    preview: PreviewInputs | None = None,
) -> TrainedLora:
    """Train adapters for ``model`` and return them; the MODEL itself is as before afterwards.

    Args:
        model: A ComfyUI MODEL, with any LoRA applied upstream: training learns on top of it.
        latents: LATENTs, see ``read_samples``.
        positive: CONDITIONINGs, one entry per latent or one for all.
        request: What to do.
        data: A training cache, in place of ``latents`` and ``positive``.
        node_id: The node that shows the progress text.
        preview: What is connected for previews.

    Raises:
        RequestError: If the inputs do not fit, before anything runs or is written.
        TrainingError: If training would be silently wrong.
        SaveError: If the LoRA does not load back into this model.
    """
    saves, preview = request.saves, preview or PreviewInputs()
    with torch.inference_mode(False):
        check_trainable(model)
        check_preview(model, request.previews, preview)
        if saves.prefix:
            check_prefix(saves.prefix)
        targets = select_targets(model.model.diffusion_model, request.lora.targets)
        check_noise_levels(model, request.levels)
        samples = read_examples(model, latents, positive, data, guidance=request.guidance)
        resumed = find_state(saves.resume_from, prefix=saves.prefix)
        start = None if resumed is None else read_state(resumed)
    dtype = training_dtype(model, request.compute_dtype)
    _LOG.info("training %d adapters on %d latents in %s", len(targets), len(samples), dtype)
    if request.plan:
        _LOG.info("%s", request.plan)
        show_text(request.plan, node_id)
    running = RunningTraining(_prompt_id(), node_id, steps=request.training.steps)
    with borrowed_model(model, dtype=dtype, keep_on_host=request.offload.enabled) as patcher:
        identity = training_identity(patcher, targets, samples, request, data=data)
        if start is not None:
            check_identity(start, identity, name=saves.resume_from)
        with prepared_model(patcher, request) as run, registered(running):
            previewer = Previewer(
                model, request.previews, preview, samples=samples, seed=request.training.seed
            )
            session = TrainingSession(
                model,
                request,
                running=running,
                identity=identity,
                start=start,
                manager=run.manager,
                previewer=previewer if can_show(model, preview) else None,
            )
            training = run.train(samples, request.training, session)
            tensors, state = session.lora(), training.state(identity)
    verify_lora(model, tensors)
    path = None
    if saves.prefix:
        path = session.save_lora(tensors, steps=state.step)
        session.states.save(state)
    return TrainedLora(tensors, {"loss": drawable(state.losses)}, state.step, path)


def training_identity(
    patcher: Any,
    targets: Sequence[Target],
    samples: Sequence[SampleSource],
    request: TrainingRequest,
    *,
    data: TrainingCache | None = None,
) -> dict[str, str]:
    """Return what has to be the same for a training to be gone on with bit for bit."""
    config = request.training
    weights = fingerprint_model(patcher.model.diffusion_model)
    # A cache knows its content without being read.
    content = data.digest if data else fingerprint([fingerprint(sample.read()) for sample in samples])
    layers = fingerprint([target.path for target in targets])
    return {
        "base model": f"{type(patcher.model).__name__} {weights}",
        "dataset": f"{len(samples)} latents {content}",
        "targets": f"{len(targets)} layers {layers}",
        "algorithm": request.lora.algorithm,
        "rank": str(request.lora.rank),
        "alpha": str(request.lora.alpha),
        "seed": str(config.seed),
        "batch_size": str(config.batch_size),
        "grad_accumulation_steps": str(config.accumulation_steps),
        "optimizer": config.optimizer,
        "loss_function": config.loss,
        "noise levels": repr(request.levels),
        "guidance": repr(request.guidance),
    }


def _prompt_id() -> str:
    """Return the id of the prompt that runs, or one of our own outside of a prompt."""
    from comfy_execution.utils import get_executing_context

    context = get_executing_context()
    return context.prompt_id if context is not None else f"local-{uuid.uuid4()}"


@dataclass(frozen=True)
class PreparedModel:
    """A model with everything on it that training needs."""

    patcher: Any
    adapters: LoraAdapters
    rewriting: OutOfPlace
    manager: OffloadTrainingManager | None
    levels: NoiseLevels

    def train(
        self, samples: Sequence[SampleSource], config: TrainingConfig, session: TrainingSession
    ) -> Training:
        """Train the adapters and return the training after its last step."""
        device = self.patcher.load_device
        process = ComfyProcess(self.patcher, device, seed=config.seed, levels=self.levels)
        self.rewrite(process, samples, seed=config.seed)

        def before_micro_step() -> None:
            comfy.model_management.throw_exception_if_processing_interrupted()
            if ahead is not None:
                ahead.before_micro_step()

        callbacks = Callbacks(
            before_micro_step=before_micro_step,
            after_backward=self.manager.after_backward if self.manager else Callbacks().after_backward,
            after_step=session.after_step,
            after_skip=session.after_skip,
        )
        training = Training(
            process,
            samples,
            self.adapters,
            config,
            device=device,
            callbacks=callbacks,
            network=self.patcher.model.diffusion_model,
        )
        cache = self.manager.modulation_cache if self.manager else None
        ahead = ModulationAhead(cache, process, training.coming_batches) if cache else None
        session.run(training)
        return training

    def rewrite(self, process: ComfyProcess, samples: Sequence[SampleSource], *, seed: int) -> None:
        """Install the out-of-place methods, and prove that they compute the same."""
        self.rewriting.install()
        if not len(self.rewriting):
            return
        batch = draw_batches(samples[:1], seed=seed, micro_step=0)[0]
        clean, noise = batch.clean.to(process.device), batch.noise.to(process.device)
        sigma = process.sigmas(torch.full_like(batch.positions, 0.5))
        noisy = process.add_noise(clean, noise, sigma)
        with torch.no_grad():
            actual = process.denoise(noisy, sigma, batch.conditions)
            self.rewriting.remove()
            expected = process.denoise(noisy, sigma, batch.conditions)
        self.rewriting.install()
        check_same_output(expected, actual, what="Writing in-place updates out of place")


@contextlib.contextmanager
def prepared_model(patcher: Any, request: TrainingRequest) -> Iterator[PreparedModel]:
    """Install, from the outside in: checkpointing, adapters, offloading, rewritten methods.

    A recomputed block has to fetch its weights again, so checkpointing is outside of offloading; the
    rewritten methods take the place of a module's own forward, so they are innermost.
    """
    denoiser = patcher.model.diffusion_model
    with contextlib.ExitStack() as stack:
        if request.gradient_checkpointing:
            blocks = BlockCheckpointing(find_blocks(denoiser))
            stack.callback(blocks.remove)
            blocks.install()
        adapters = LoraAdapters(
            select_targets(denoiser, request.lora.targets),
            request.lora,
            seed=request.training.seed,
            device=patcher.load_device,
        )
        stack.enter_context(adapters)
        manager = None
        if request.offload.enabled:
            expected_bytes = model_bytes(denoiser)
            manager = OffloadTrainingManager(
                denoiser,
                patcher.load_device,
                enable_optimizer_cpu_offload=request.offload.optimizer_on_cpu,
                cpu_offload_split_threshold=request.offload.split_threshold_mb,
                modulation=modulation_plan(denoiser, limit_mb=request.offload.modulation_cache_mb),
            )
            stack.callback(manager.remove)
            stats = manager.stats()
            check_managed_bytes(stats.streamed_bytes + stats.resident_set_bytes, expected_bytes)
        rewriting = OutOfPlace(denoiser)
        stack.callback(rewriting.remove)
        yield PreparedModel(patcher, adapters, rewriting, manager, request.levels)


def drawable(losses: list[float]) -> list[float]:
    """Return the losses so that ComfyUI's loss graph can draw them: it divides by max - min."""
    if len(set(losses)) > 1:
        return losses
    return [*losses, math.nextafter(losses[-1], math.inf)]
