"""The work and the engines of ``offload_training.py``; one row runs in a process of its own.

``toy`` is DiffSynth-Studio's example: ten residual Linear layers, all of them trained, AdamW as it
comes. ``qwen`` is a LoRA step on diffusers' Qwen-Image class with random weights and gradient
checkpointing. The LoRA is a few lines here, outside the model and the same for every engine, so that
each sees frozen blocks only.

A rival is imported from where it is said to be: a folder with the unpacked wheel (``diffsynth``; only
``diffsynth/core/offload_training`` of it is needed, and torch), or a checkout (``musubi``; only
``src/musubi_tuner/modules/custom_offloading_utils.py``).
"""

from __future__ import annotations

import functools
import importlib.util
import sys
import time
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
# The layers that DiffSynth-Studio's example script trains on Qwen-Image.
QWEN_TARGETS = (
    "to_q,to_k,to_v,add_q_proj,add_k_proj,add_v_proj,to_out.0,to_add_out,img_mlp.net.2,img_mod.1,"
    "txt_mlp.net.2,txt_mod.1"
).split(",")
RANK = 32
ROWS = {
    "toy": (
        "gpu only",
        "gpu only, fused",
        "ferry",
        "ferry, overlapped",
        "ferry, overlapped into the next step",
        "diffsynth",
    ),
    "qwen": (
        "gpu only",
        "ferry",
        "ferry, inputs on the host",
        "ferry, not recorded",
        "ferry, kept over the step",
        "ferry, modulation",
        "ferry, inputs on the host, modulation",
        "ferry, inputs on the host, modulation within the step",
        "ferry, budget",
        "diffsynth",
        "musubi",
    ),
}
RIVALS = ("diffsynth", "musubi")

Step = Callable[[], None]


@dataclass
class Job:
    """One row.

    Attributes:
        work: ``toy`` or ``qwen``.
        row: Its name in ``ROWS``.
        device: Where it computes.
        pixels: Side of the picture, for ``qwen``.
        is_tiny: Sizes that only try the script.
        rivals: Where each rival lies.
        budget_gb: Target memory of the row with a budget, in GB (10**9 bytes).
        manager: Our manager once attached, for its statistics.
        ahead: What was computed ahead by the row with a modulation cache: for how many ``steps``, in how
            many ``seconds``.
        recorded: Our recordings of the blocks, if there are any.
    """

    work: str
    row: str
    device: str
    pixels: int
    is_tiny: bool
    rivals: dict[str, str]
    budget_gb: float
    manager: Any = field(default=None)
    ahead: dict[str, float] = field(default_factory=dict)
    recorded: Any = field(default=None)

    def build(self) -> Step:
        """Return one training step."""
        return (_build_toy if self.work == "toy" else _build_qwen)(self)


def load_ferry(part: str = "offload") -> types.ModuleType:
    """Return a part of this pack's core, also where the pack is not installed."""
    if "comfyui_ferry" not in sys.modules:
        _load("comfyui_ferry", ROOT / "__init__.py", folder=ROOT)
    return importlib.import_module(f"comfyui_ferry.core.{part}")


def load_diffsynth(folder: str) -> type:
    """Return DiffSynth-Studio's manager without the imports of the rest of its package."""
    package = Path(folder) / "diffsynth" / "core" / "offload_training"
    return _load("diffsynth_offload_training", package / "__init__.py", folder=package).OffloadTrainingManager


def load_musubi(folder: str) -> type:
    """Return musubi-tuner's H2D-only offloader."""
    file = Path(folder) / "src" / "musubi_tuner" / "modules" / "custom_offloading_utils.py"
    return _load("musubi_custom_offloading_utils", file).LoRAStreamOffloader


def _load(name: str, file: Path, *, folder: Path | None = None) -> Any:
    locations = None if folder is None else [str(folder)]
    spec = importlib.util.spec_from_file_location(name, file, submodule_search_locations=locations)
    assert spec is not None and spec.loader is not None, file
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Toy(nn.Module):
    """Ten residual Linear layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[512, width]`` to the same."""
        for layer in self.layers:
            x = x + layer(nn.functional.layer_norm(x, (self.width,)))
        return x


def _build_toy(job: Job) -> Step:
    width = 64 if job.is_tiny else 4096
    model = Toy(width)
    if job.row.startswith("gpu only"):
        model = model.to(job.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True if "fused" in job.row else None)
    manager = None
    if job.row.startswith("ferry"):
        manager = job.manager = load_ferry().OffloadTrainingManager(
            model, job.device, enable_optimizer_cpu_offload=True
        )
        if "overlapped" in job.row:
            finish = "next use" if "into the next step" in job.row else "step"
            manager.overlap_optimizer(optimizer, finish=finish)
    elif job.row == "diffsynth":
        manager = load_diffsynth(job.rivals["diffsynth"])(
            model, job.device, enable_optimizer_cpu_offload=True
        )

    def step() -> None:
        x = torch.randn(512, width, device=job.device)
        nn.functional.mse_loss(model(x), x + 1).backward()
        if manager is not None:
            manager.after_backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


class Lora(nn.Module):
    """A LoRA on one Linear, which it does not own."""

    def __init__(self, linear: nn.Linear, device: str) -> None:
        super().__init__()
        self.down = nn.Linear(linear.in_features, RANK, bias=False, device=device)
        self.up = nn.Linear(RANK, linear.out_features, bias=False, device=device)
        nn.init.zeros_(self.up.weight)

    def add_to(self, linear: nn.Linear) -> None:
        """Add its output to what the layer gives."""
        linear.register_forward_hook(lambda _, inputs, output: output + self.up(self.down(inputs[0])))


def _build_qwen(job: Job) -> Step:
    from diffusers import QwenImageTransformer2DModel

    sizes: dict[str, Any] = {"num_layers": 60}
    if job.is_tiny:
        sizes = {
            "num_layers": 3,
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "joint_attention_dim": 32,
            "axes_dims_rope": (4, 6, 6),
        }
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(job.device):
        model = QwenImageTransformer2DModel(**sizes)
    model.requires_grad_(False)
    model.train()
    record = _checkpoint(job, model)
    loras = nn.ModuleList()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and any(name.endswith("." + target) for target in QWEN_TARGETS):
            loras.append(Lora(module, job.device))
            loras[-1].add_to(module)  # pyright: ignore[reportCallIssue]
    step_end = _attach_qwen(job, model)
    record()
    optimizer = torch.optim.AdamW(loras.parameters(), lr=1e-4, fused=job.device != "cpu" or None)
    side = 2 if job.is_tiny else job.pixels // 16
    tokens, width = (8, 32) if job.is_tiny else (256, 3584)
    inputs = {
        "hidden_states": torch.randn(1, side * side, 64, device=job.device),
        "encoder_hidden_states": torch.randn(1, tokens, width, device=job.device),
        "encoder_hidden_states_mask": torch.ones(1, tokens, device=job.device, dtype=torch.bool),
        "img_shapes": [[(1, side, side)]],
        "return_dict": False,
    }

    timesteps = torch.rand(1000, 1, generator=torch.Generator().manual_seed(0)).to(job.device, torch.bfloat16)
    forwards = [functools.partial(model, timestep=timestep, **inputs) for timestep in timesteps]
    done = prepared = 0

    def step() -> None:
        nonlocal done, prepared
        if done == prepared and job.row.endswith("modulation"):  # else the backward has the forward's
            begin = time.perf_counter()
            prepared += job.manager.modulation_cache.precompute(forwards[done:])
            if torch.device(job.device).type == "cuda":
                torch.cuda.synchronize()
            job.ahead = {"steps": prepared - done, "seconds": time.perf_counter() - begin}
        forward = forwards[done]
        done += 1
        _follow_plan(job)
        (forward()[0].float() - 1).pow(2).mean().backward()
        step_end()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _checkpoint(job: Job, model: Any) -> Step:
    """Switch checkpointing on; return what records the blocks, once the model has its engine."""
    if not job.row.startswith("ferry"):
        model.enable_gradient_checkpointing()
        return lambda: None
    training = load_ferry("training")
    blocks = training.find_blocks(model)
    is_recorded = "not recorded" not in job.row and job.device != "cpu"
    on_host = "inputs on the host" in job.row or "budget" in job.row
    training.BlockCheckpointing(blocks, keeps_last=not is_recorded, inputs_on_host=on_host).install()
    if is_recorded:
        job.recorded = training.RecordedBlocks(blocks, job.device)
        return job.recorded.install
    return lambda: None


def _follow_plan(job: Job) -> None:
    """Record blocks once there is a plan that leaves room for it."""
    if job.recorded is not None and job.manager.tuner is not None:
        job.manager.tuner.reserve = lambda: job.recorded.needed_bytes
        job.recorded.may_record = job.manager.tuner.has_reserve


def _attach_qwen(job: Job, model: nn.Module) -> Step:
    """Give the model its engine; return what follows each backward."""
    if job.row == "gpu only":
        return lambda: None
    if job.row == "musubi":
        _attach_musubi(
            load_musubi(job.rivals["musubi"]),
            list(model.get_submodule("transformer_blocks").children()),
            model,
            job.device,
        )
        return lambda: None
    if job.row == "diffsynth":
        model.to("cpu")
        return load_diffsynth(job.rivals["diffsynth"])(model, job.device).after_backward
    offload = load_ferry()
    budget = offload.OffloadBudget(vram_gb=job.budget_gb) if "budget" in job.row else None
    modulation = None
    if "modulation" in job.row:
        paths = ("transformer_blocks.*.img_mod", "transformer_blocks.*.txt_mod")
        modulation = offload.ModulationPlan(tuple(offload.ModulationLayers(path, "1") for path in paths))
    # 800 MB: one transformer block (about 680 MB) moves as a whole.
    job.manager = offload.OffloadTrainingManager(
        model,
        job.device,
        cpu_offload_split_threshold=800,
        budget=budget,
        modulation=modulation,
        prefetch_next_forward="over the step" in job.row,
    )
    return job.manager.after_backward


def _attach_musubi(kind: type, blocks: list[nn.Module], model: nn.Module, device: str) -> None:
    """Stream all blocks; its calls stand around each block's forward, as in musubi-tuner's models."""
    for name, child in model.named_children():
        if name != "transformer_blocks":
            child.to(device)
    offloader: Any = kind(
        "transformer", blocks, len(blocks), len(blocks), supports_backward=True, device=torch.device(device)
    )
    offloader.prepare_block_devices_before_forward(blocks)

    def before(index: int) -> Callable[..., None]:
        return lambda *_: offloader.wait_for_block(index)

    def after(index: int) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            if torch._C._current_graph_task_id() == -1:  # a recompute is part of its backward
                offloader.submit_move_blocks_forward(blocks, index)

        return hook

    for index, block in enumerate(blocks):
        block.register_forward_pre_hook(before(index))
        block.register_forward_hook(after(index))
