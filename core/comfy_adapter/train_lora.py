"""Train a LoRA on a ComfyUI MODEL: what the node calls."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import comfy.model_management
import comfy.utils
import torch
from torch import Tensor

from ..log import get_logger
from ..offload import OffloadTrainingManager
from ..training import (
    BlockCheckpointing,
    Callbacks,
    LoraAdapters,
    LoraConfig,
    OffloadSettings,
    OutOfPlace,
    SampleSource,
    Training,
    TrainingConfig,
    check_same_output,
    draw_batches,
    find_blocks,
    select_targets,
)
from .lora_files import check_prefix, save_lora, verify_lora
from .modulation import ModulationAhead, modulation_plan
from .trainable_model import COMPUTE_DTYPES, borrowed_model, check_trainable, training_dtype
from .training import ComfyProcess
from .training_inputs import read_samples

_LOG = get_logger("training")
__all__ = ["COMPUTE_DTYPES", "SAVE_DTYPES", "TrainedLora", "TrainingRequest", "run_lora_training"]

_PREFIX = "diffusion_model."
SAVE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class TrainingRequest:
    """Everything about a training but the model and the data.

    Attributes:
        lora: Rank, alpha, targets.
        training: The loop's settings.
        offload: How the base weights reach the training device.
        compute_dtype: One of ``COMPUTE_DTYPES``, see ``training_dtype``.
        save_dtype: One of ``SAVE_DTYPES``, of the returned and saved tensors; the masters are fp32.
        gradient_checkpointing: Compute each block again in the backward pass.
        save_prefix: File prefix in ComfyUI's output folder; empty saves nothing.
    """

    lora: LoraConfig
    training: TrainingConfig
    offload: OffloadSettings
    compute_dtype: str = "auto"
    save_dtype: str = "bf16"
    gradient_checkpointing: bool = True
    save_prefix: str = ""

    @classmethod
    def from_widgets(cls, widgets: dict[str, Any]) -> TrainingRequest:
        """Return the request of a node, whose widgets are flat.

        Raises:
            RequestError: If a value is out of its range.
        """
        threshold_mb = widgets["split_threshold_mb"]
        return cls(
            lora=LoraConfig(widgets["rank"], widgets["alpha"], widgets["targets"]),
            training=TrainingConfig(
                steps=widgets["steps"],
                learning_rate=widgets["learning_rate"],
                batch_size=widgets["batch_size"],
                accumulation_steps=widgets["grad_accumulation_steps"],
                seed=widgets["seed"],
                optimizer=widgets["optimizer"],
                loss=widgets["loss_function"],
            ),
            offload=OffloadSettings(
                enabled=widgets["offload"],
                optimizer_on_cpu=widgets["optimizer_on_cpu"],
                split_threshold_mb=threshold_mb if threshold_mb else None,
            ),
            compute_dtype=widgets["training_dtype"],
            save_dtype=widgets["lora_dtype"],
            gradient_checkpointing=widgets["gradient_checkpointing"],
            save_prefix=widgets["save_prefix"].strip(),
        )


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
    node_id: str | None = None,
) -> TrainedLora:
    """Train adapters for ``model`` and return them; the MODEL itself is as before afterwards.

    Args:
        model: A ComfyUI MODEL, with any LoRA applied upstream: training learns on top of it.
        latents: LATENTs, see ``read_samples``.
        positive: CONDITIONINGs, one entry per latent or one for all.
        request: What to do.
        node_id: The node that shows the progress text.

    Raises:
        RequestError: If the inputs do not fit, before anything runs or is written.
        TrainingError: If training would be silently wrong.
        SaveError: If the LoRA does not load back into this model.
    """
    with torch.inference_mode(False):
        check_trainable(model)
        if request.save_prefix:
            check_prefix(request.save_prefix)
        targets = select_targets(model.model.diffusion_model, request.lora.targets)
        samples = read_samples(model, latents, positive)
    dtype = training_dtype(model, request.compute_dtype)
    _LOG.info("training %d adapters on %d latents in %s", len(targets), len(samples), dtype)
    with borrowed_model(model, dtype=dtype, keep_on_host=request.offload.enabled) as patcher:
        with prepared_model(patcher, request) as run:
            losses = run.train(samples, request.training, node_id=node_id)
        tensors = run.adapters.state_dict(prefix=_PREFIX, dtype=SAVE_DTYPES[request.save_dtype])
    verify_lora(model, tensors)
    path = None
    if request.save_prefix:
        path = save_lora(model, tensors, prefix=request.save_prefix, metadata=_metadata(model, request))
        _LOG.info("saved %s", path)
    return TrainedLora(tensors, {"loss": drawable(losses)}, request.training.steps, path)


@dataclass(frozen=True)
class PreparedModel:
    """A model with everything on it that training needs."""

    patcher: Any
    adapters: LoraAdapters
    rewriting: OutOfPlace
    manager: OffloadTrainingManager | None

    def train(
        self, samples: Sequence[SampleSource], config: TrainingConfig, *, node_id: str | None
    ) -> list[float]:
        """Train the adapters and return the loss of every step."""
        device = self.patcher.load_device
        process = ComfyProcess(self.patcher, device, seed=config.seed)
        self.rewrite(process, samples, seed=config.seed)
        bar = comfy.utils.ProgressBar(config.steps)

        def report(step: int, loss: float) -> None:
            bar.update_absolute(step, config.steps)
            _show_text(f"step {step}/{config.steps}  loss {loss:.5f}", node_id)

        def before_micro_step() -> None:
            comfy.model_management.throw_exception_if_processing_interrupted()
            if ahead is not None:
                ahead.before_micro_step()

        callbacks = Callbacks(
            before_micro_step=before_micro_step,
            after_backward=self.manager.after_backward if self.manager else Callbacks().after_backward,
            after_step=report,
        )
        training = Training(process, samples, self.adapters, config, device=device, callbacks=callbacks)
        cache = self.manager.modulation_cache if self.manager else None
        ahead = ModulationAhead(cache, process, training.coming_batches) if cache else None
        return training.run()

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
            manager = OffloadTrainingManager(
                denoiser,
                patcher.load_device,
                enable_optimizer_cpu_offload=request.offload.optimizer_on_cpu,
                cpu_offload_split_threshold=request.offload.split_threshold_mb,
                modulation=modulation_plan(denoiser, limit_mb=request.offload.modulation_cache_mb),
            )
            stack.callback(manager.remove)
        rewriting = OutOfPlace(denoiser)
        stack.callback(rewriting.remove)
        yield PreparedModel(patcher, adapters, rewriting, manager)


def drawable(losses: list[float]) -> list[float]:
    """Return the losses so that ComfyUI's loss graph can draw them: it divides by max - min."""
    if len(set(losses)) > 1:
        return losses
    return [*losses, math.nextafter(losses[-1], math.inf)]


def _metadata(model: Any, request: TrainingRequest) -> dict[str, str]:
    return {
        "format": "pt",
        "base_model": type(model.model).__name__,
        "rank": str(request.lora.rank),
        "alpha": str(request.lora.alpha),
        "steps": str(request.training.steps),
        "learning_rate": str(request.training.learning_rate),
        "seed": str(request.training.seed),
    }


def _show_text(text: str, node_id: str | None) -> None:
    """Show a line on the node, if a server is running."""
    server = sys.modules.get("server")  # ComfyUI's; not imported for this, it is a whole web server
    instance = getattr(getattr(server, "PromptServer", None), "instance", None)
    if instance is not None and node_id is not None:
        instance.send_progress_text(text, node_id)
