"""Seconds a step and peak GPU memory of training with offload, beside the same training without.

    python benchmarks/offload_training.py toy
    python benchmarks/offload_training.py qwen

Every row: median and range of the timed steps after warm-up; peak of ``torch.cuda.max_memory_allocated``.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable

import torch
from comfyui_ferry.core.offload import OffloadTrainingManager
from torch import nn

GIB = 2**30
# The layers that DiffSynth-Studio's example script trains on Qwen-Image.
QWEN_TARGETS = (
    "to_q,to_k,to_v,add_q_proj,add_k_proj,add_v_proj,to_out.0,to_add_out,img_mlp.net.2,img_mod.1,"
    "txt_mlp.net.2,txt_mod.1"
).split(",")


def measure(name: str, step: Callable[[], None], *, warm_up: int, steps: int) -> None:
    """Time ``step`` and print one row."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    seconds = []
    for index in range(warm_up + steps):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        if index >= warm_up:
            seconds.append(time.perf_counter() - start)
    median = statistics.median(seconds)
    peak = torch.cuda.max_memory_allocated() / GIB
    spread = f"{min(seconds):.4f} to {max(seconds):.4f}"
    print(f"| {name} | {median:.4f} s | {spread} | {peak:.2f} GiB |", flush=True)


class Toy(nn.Module):
    """DiffSynth-Studio's example: ten residual Linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4096, 4096) for _ in range(10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[512, 4096]`` to ``[512, 4096]``."""
        for layer in self.layers:
            x = x + layer(nn.functional.layer_norm(x, (4096,)))
        return x


def toy_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, manager: OffloadTrainingManager | None
) -> Callable[[], None]:
    """Return one training step of the toy."""

    def step() -> None:
        x = torch.randn(512, 4096, device="cuda")
        nn.functional.mse_loss(model(x), x + 1).backward()
        if manager is not None:
            manager.after_backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def run_toy() -> None:
    """Full training of the toy, with the optimizer that the example has and with a fused one."""
    for fused in (False, True):
        label = "fused AdamW" if fused else "AdamW"
        model = Toy().cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused)
        measure(f"toy, GPU only, {label}", toy_step(model, optimizer, None), warm_up=3, steps=10)
        del model, optimizer
        model = Toy()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused)
        with OffloadTrainingManager(model, "cuda", enable_optimizer_cpu_offload=True) as manager:
            step = toy_step(model, optimizer, manager)
            measure(f"toy, weights and optimizer offloaded, {label}", step, warm_up=3, steps=10)


def qwen_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    manager: OffloadTrainingManager | None,
    pixels: int,
) -> Callable[[], None]:
    """Return one LoRA step on a ``pixels x pixels`` picture with 256 text tokens."""
    side = pixels // 16
    inputs = {
        "hidden_states": torch.randn(1, side * side, 64, device="cuda"),
        "encoder_hidden_states": torch.randn(1, 256, 3584, device="cuda"),
        "encoder_hidden_states_mask": torch.ones(1, 256, device="cuda", dtype=torch.bool),
        "timestep": torch.tensor([0.5], device="cuda"),
        "img_shapes": [[(1, side, side)]],
        "return_dict": False,
    }

    def step() -> None:
        (model(**inputs)[0].float() - 1).pow(2).mean().backward()
        if manager is not None:
            manager.after_backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def run_qwen() -> None:
    """LoRA rank 32 on diffusers' Qwen-Image class, bf16, random weights, gradient checkpointing."""
    from diffusers import QwenImageTransformer2DModel
    from peft import LoraConfig

    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = QwenImageTransformer2DModel(num_layers=60)
    model.requires_grad_(False)
    model.enable_gradient_checkpointing()
    model.train()
    model.add_adapter(LoraConfig(r=32, lora_alpha=32, target_modules=QWEN_TARGETS))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    for pixels in (1024, 512):
        step = qwen_step(model, optimizer, None, pixels)
        measure(f"Qwen-Image LoRA {pixels}, GPU only", step, warm_up=1, steps=3)
    del optimizer
    model.to("cpu")
    # 800 MB: one transformer block (about 680 MB) moves as a whole.
    with OffloadTrainingManager(model, "cuda", cpu_offload_split_threshold=800) as manager:
        optimizer = torch.optim.AdamW(trained, lr=1e-4)
        for pixels in (1024, 512):
            step = qwen_step(model, optimizer, manager, pixels)
            measure(f"Qwen-Image LoRA {pixels}, streamed by block", step, warm_up=1, steps=3)


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("work", choices=["toy", "qwen"])
    work = parser.parse_args().work
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print("| work | median | range | peak |\n|---|---|---|---|")
    {"toy": run_toy, "qwen": run_qwen}[work]()


if __name__ == "__main__":
    main()
