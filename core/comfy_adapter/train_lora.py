"""Train a LoRA on a ComfyUI MODEL: what the node calls."""

from __future__ import annotations

import contextlib
import gc
import math
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import comfy.model_management
import torch
from torch import Tensor

from ..log import get_logger
from ..offload import SharedMasters
from ..training import (
    SampleSource,
    Target,
    check_continues,
    check_device,
    check_identity,
    fingerprint,
    fingerprint_model,
    read_state,
    select_targets,
)
from ..training.dataset import TrainingCache
from .cached_samples import read_examples
from .lora_files import check_prefix
from .prepared_model import prepared_model
from .running_trainings import RunningTraining, registered
from .trainable_model import borrowed_model, check_trainable, training_dtype
from .training import check_noise_levels
from .training_helpers import check_helpers, describe_training, running_helpers
from .training_preview import Previewer, PreviewInputs, can_show, check_preview
from .training_request import (
    COMPUTE_DTYPES,
    RESUME_LATEST,
    SAVE_DTYPES,
    PreviewSettings,
    SaveSettings,
    TrainingRequest,
)
from .training_session import TrainingSession
from .training_states import find_state, note_complete, resume_version

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
    try:
        return _run(model, latents, positive, request, data=data, node_id=node_id, preview=preview)
    finally:
        if model.load_device.type == "cuda":
            _release_memory(model.load_device)


def _run(
    model: Any,
    latents: Sequence[dict],
    positive: Sequence[list],
    request: TrainingRequest,
    *,
    data: TrainingCache | None,
    node_id: str | None,
    preview: PreviewInputs | None,
) -> TrainedLora:
    saves, preview = request.saves, preview or PreviewInputs()
    on_host = request.offload.optimizer_on_cpu
    with torch.inference_mode(False):
        check_trainable(model)
        if saves.prefix:
            check_prefix(saves.prefix)
        check_device(request.training.optimizer, "cpu" if on_host else model.load_device)
        targets = select_targets(model.model.diffusion_model, request.lora.targets)
        check_noise_levels(model, request.levels)
        helpers = check_helpers(model, request)
        samples = read_examples(model, latents, positive, data, guidance=request.guidance)
        check_preview(model, request.previews, preview, samples)
        begun = resume_version(saves.resume_from, saves.prefix)
        resumed = find_state(saves.resume_from, prefix=saves.prefix)
        start = None if resumed is None else read_state(resumed)
        if start is not None:
            check_continues(start, request.training)
    dtype = training_dtype(model, request.compute_dtype)
    _LOG.info("training %d adapters on %d latents in %s", len(targets), len(samples), dtype)
    running = RunningTraining(_prompt_id(), node_id, steps=request.training.steps)
    gpus = [model.load_device] if model.load_device.type == "cuda" else []
    with (
        torch.random.fork_rng(devices=gpus),
        borrowed_model(model, dtype=dtype, keep_on_host=request.offload.enabled) as patcher,
    ):
        identity = training_identity(patcher, targets, samples, request, data=data)
        if start is not None:
            check_identity(start, identity, name=saves.resume_from)
        message = describe_training(patcher, request) if helpers else None
        shared = SharedMasters.create() if helpers else None
        with prepared_model(patcher, request, shared=shared) as run, registered(running):
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
                recorded=run.network.recorded,
                previewer=previewer if can_show(model, preview) else None,
            )
            with contextlib.ExitStack() as stack:
                started = None
                if message is not None and shared is not None:
                    started = stack.enter_context(
                        running_helpers(
                            helpers, message, shared, process=run.process, samples=samples, request=request
                        )
                    )
                training = run.train(samples, request.training, session, helpers=started)
            tensors, state = session.lora(), training.state(identity)
    path = session.close(tensors, state)
    is_complete = state.step == request.training.steps
    if is_complete and saves.resume_from == RESUME_LATEST and session.states.last is not None:
        note_complete(begun, session.states.last)
    return TrainedLora(tensors, {"loss": drawable(state.losses)}, state.step, path)


def _release_memory(device: torch.device) -> None:
    """Give the GPU memory of a training that ended to the next node, not just sometime.

    The training's objects refer to each other, so Python lets go of them only when it collects garbage. And
    PyTorch keeps what cuBLAS works in for good: 32 MiB on a Hopper GPU for every pair of a thread and a
    stream, also for the stream that blocks were recorded on. It is made again when it is needed.
    """
    gc.collect()
    torch.cuda.synchronize(device)
    torch._C._cuda_clearCublasWorkspaces()
    comfy.model_management.soft_empty_cache()


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
    biases = ["biases"] if request.lora.trains_biases else []
    layers = fingerprint([*(target.path for target in targets), *biases])
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


def drawable(losses: list[float]) -> list[float]:
    """Return the losses so that ComfyUI's loss graph can draw them: it divides by max - min."""
    if len(set(losses)) > 1:
        return losses
    return [*losses, math.nextafter(losses[-1], math.inf)]
