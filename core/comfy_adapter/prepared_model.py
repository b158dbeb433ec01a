"""A diffusion model with everything on it that training needs, in this process or in a helper's.

What this module does not do: it reads no data and saves nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import comfy.model_management
import torch
from comfy.ldm.modules.attention import optimized_attention
from torch import Tensor, nn

from ..offload import OffloadBudget, OffloadTrainingManager, SharedMasters, retry_on_oom
from ..training import (
    BlockCheckpointing,
    Callbacks,
    Helpers,
    LoraAdapters,
    LoraConfig,
    OffloadSettings,
    OutOfPlace,
    RecordedBlocks,
    SampleSource,
    Training,
    TrainingConfig,
    check_managed_bytes,
    check_same_output,
    draw_batches,
    find_blocks,
    model_bytes,
    seed_torch,
    select_targets,
)
from .modulation import ModulationAhead, modulation_plan
from .training import ComfyProcess
from .training_request import TrainingRequest
from .training_session import TrainingSession

# The first teaches the order of the copies, the second is measured; then there is a plan.
_REHEARSED_PASSES = 2
_MB = 2**20


@dataclass(frozen=True)
class PreparedNetwork:
    """A diffusion model ready for backward passes; ``rewriting`` is not installed yet.

    Attributes:
        adapters: What is trained.
        rewriting: The out-of-place methods.
        manager: The offload engine, None without.
        has_budget: Whether it plans what stays on the device, from the second pass on.
        recorded: The recordings of its blocks, None if there are to be none.
    """

    adapters: LoraAdapters
    rewriting: OutOfPlace
    manager: OffloadTrainingManager | None
    has_budget: bool = False
    recorded: RecordedBlocks | None = None

    def run_passes(self, passes: Callable[[], Any]) -> Any:
        """Run the passes of a step; if they run out of memory, keep less on the device and repeat them."""
        if self.manager is None:
            return passes()
        if self.recorded is None:
            return retry_on_oom(self.manager, passes)
        tuner = self.manager.tuner
        # Its plan leaves room for recordings if it can; until there is one, blocks are only looked at.
        self.recorded.may_record = tuner is None or tuner.has_reserve
        if tuner is not None and tuner.is_done and not tuner.has_reserve:
            self.recorded.stop()
        return retry_on_oom(self.manager, passes, release=self.recorded.stop)


@contextlib.contextmanager
def prepared_network(
    denoiser: nn.Module,
    lora: LoraConfig,
    offload: OffloadSettings,
    *,
    seed: int,
    device: torch.device,
    gradient_checkpointing: bool,
    shared: SharedMasters | None = None,
) -> Iterator[PreparedNetwork]:
    """Install, from the outside in: checkpointing, adapters, offloading, recording, rewritten methods.

    A recomputed block has to fetch its weights again, so checkpointing is outside of offloading; a recording
    reads them where they were brought to; the rewritten methods take the place of a module's own forward, so
    they are innermost.

    Args:
        denoiser: The diffusion model, without gradients.
        lora: What is put on it.
        offload: How its weights reach ``device``.
        seed: Of the adapters' start.
        device: Where it computes.
        gradient_checkpointing: Whether blocks are computed again in the backward pass.
        shared: Memory for its weights that other processes map too.
    """
    settle_attention(device)
    with contextlib.ExitStack() as stack:
        is_streamed = offload.enabled and gradient_checkpointing and device.type == "cuda"
        records = is_streamed and offload.record_blocks
        blocks = find_blocks(denoiser) if gradient_checkpointing else []
        checkpointing = BlockCheckpointing(
            blocks, keeps_last=not records, inputs_on_host=is_streamed and offload.inputs_on_host
        )
        stack.callback(checkpointing.remove)
        checkpointing.install()
        adapters = LoraAdapters(select_targets(denoiser, lora.targets), lora, seed=seed, device=device)
        stack.enter_context(adapters)
        manager = budget = recorded = None
        if offload.enabled:
            budget = _budget(offload, device)
            threshold_mb = offload.split_threshold_mb
            if records and threshold_mb is None:
                threshold_mb = max((model_bytes(block.module) for block in blocks), default=0) / _MB or None
            expected_bytes = model_bytes(denoiser)
            manager = OffloadTrainingManager(
                denoiser,
                device,
                enable_optimizer_cpu_offload=offload.optimizer_on_cpu,
                cpu_offload_split_threshold=threshold_mb,
                modulation=modulation_plan(denoiser, limit_mb=offload.modulation_cache_mb),
                budget=budget,
                shared_masters=shared,
            )
            stack.callback(manager.remove)
            stats = manager.stats()
            check_managed_bytes(stats.streamed_bytes + stats.resident_set_bytes, expected_bytes)
        if manager is not None and records:
            recorded = RecordedBlocks(blocks, device)
            stack.callback(recorded.remove)
            recorded.install()
            if manager.tuner is not None:
                manager.tuner.recordings = recorded
        rewriting = OutOfPlace(denoiser)
        stack.callback(rewriting.remove)
        yield PreparedNetwork(adapters, rewriting, manager, budget is not None, recorded)


def settle_attention(device: torch.device) -> None:
    """Make the first attention call of a process on a CUDA device, with nothing in it.

    PyTorch takes its own choice of a kernel then, whatever order ComfyUI asks for, and ComfyUI's from the
    second call on (seen with torch 2.11 on an H200). A block computed again in the backward pass, or compared
    with itself, would differ by that.
    """
    if device.type == "cuda":
        q = torch.zeros(1, 1024, 128, device=device, dtype=torch.bfloat16)  # the least that has an order
        optimized_attention(q, q, q, heads=1)


def _budget(offload: OffloadSettings, device: torch.device) -> OffloadBudget | None:
    """Return what the residency is planned for; None plans none (the CPU has no memory of its own)."""
    if device.type != "cuda" and not (offload.vram_budget_gb or offload.ram_budget_gb):
        return None
    return OffloadBudget(vram_gb=offload.vram_budget_gb or "auto", ram_gb=offload.ram_budget_gb or None)


@dataclass(frozen=True)
class PreparedModel:
    """A patched MODEL ready for training in this process."""

    patcher: Any
    network: PreparedNetwork
    process: ComfyProcess

    @property
    def adapters(self) -> LoraAdapters:
        """What is trained."""
        return self.network.adapters

    @property
    def manager(self) -> OffloadTrainingManager | None:
        """The offload engine, None without."""
        return self.network.manager

    def train(
        self,
        samples: Sequence[SampleSource],
        config: TrainingConfig,
        session: TrainingSession,
        *,
        helpers: Helpers | None = None,
    ) -> Training:
        """Train the adapters and return the training after its last step."""
        process = self.process
        self.rewrite(process, samples, seed=config.seed)

        ahead: ModulationAhead | None = None

        def before_micro_step() -> None:
            comfy.model_management.throw_exception_if_processing_interrupted()
            if ahead is not None:
                ahead.before_micro_step()

        callbacks = Callbacks(
            before_micro_step=before_micro_step,
            after_backward=self.manager.after_backward if self.manager else Callbacks().after_backward,
            after_step=session.after_step,
            after_skip=session.after_skip,
            run_passes=self.network.run_passes,
        )
        training = Training(
            process,
            samples,
            self.adapters,
            config,
            device=process.device,
            callbacks=callbacks,
            network=self.patcher.model.diffusion_model,
            helpers=helpers,
        )
        cache = self.manager.modulation_cache if self.manager else None
        if self.network.has_budget:
            if self.manager is not None and self.manager.tuner is not None:
                self.manager.tuner.later_bytes = lambda: training.weights.later_bytes(process.device)
            training.rehearse(_REHEARSED_PASSES)
        ahead = ModulationAhead(cache, process, training.coming_batches) if cache else None
        session.run(training)
        return training

    def rewrite(self, process: ComfyProcess, samples: Sequence[SampleSource], *, seed: int) -> None:
        """Install the out-of-place methods, and prove that they compute the same."""
        rewriting = self.network.rewriting
        rewriting.install()
        if not len(rewriting):
            return
        batch = draw_batches(samples[:1], seed=seed, micro_step=0)[0]
        clean, noise = batch.clean.to(process.device), batch.noise.to(process.device)
        sigma = process.sigmas(torch.full_like(batch.positions, 0.5))
        noisy = process.add_noise(clean, noise, sigma)

        def output() -> Tensor:
            seed_torch(seed, process.device)
            return process.denoise(noisy, sigma, batch.conditions)

        with torch.no_grad():
            actual = self.network.run_passes(output)
            rewriting.remove()
            expected = self.network.run_passes(output)
        rewriting.install()
        check_same_output(expected, actual, what="Writing in-place updates out of place")


@contextlib.contextmanager
def prepared_model(
    patcher: Any, request: TrainingRequest, *, shared: SharedMasters | None = None
) -> Iterator[PreparedModel]:
    """Prepare the network of a patched MODEL; see ``prepared_network``."""
    network = prepared_network(
        patcher.model.diffusion_model,
        request.lora,
        request.offload,
        seed=request.training.seed,
        device=patcher.load_device,
        gradient_checkpointing=request.gradient_checkpointing,
        shared=shared,
    )
    with network as prepared:
        process = ComfyProcess(
            patcher, patcher.load_device, seed=request.training.seed, levels=request.levels
        )
        yield PreparedModel(patcher, prepared, process)
