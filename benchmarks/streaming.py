"""Seconds a step and peak GPU memory of a model whose weights stream within a budget, beside its rivals.

    COMFYUI_PATH=... python benchmarks/streaming.py --model qwen --budgets 4 8 16 24
    COMFYUI_PATH=... python benchmarks/streaming.py --model flux --budgets 4 8 16 24
    COMFYUI_PATH=... python benchmarks/streaming.py --tiny            # tries the script on the CPU

One step is one call of the diffusion model at 1024 x 1024, batch 1, bf16, random weights. Every row runs
in a process of its own. The limit is max(compute, bytes / link): compute is the resident model's step,
bytes are what does not fit the budget, and the link is measured by pinned copies of 256 MiB. Rivals get
the same cap: ComfyUI's low-VRAM loading is told to load that many bytes; dynamic VRAM finds the rest of
the card occupied; diffusers' group offloading uses the largest groups of which two fit.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

GIB = 2**30
ROOT = Path(__file__).resolve().parent.parent
ROWS = ("ferry", "comfyui lowvram", "comfyui async", "comfyui dynamic", "diffusers group")
# Left free beside the budget for what the computation itself takes, where a rival's cap is the free memory.
ACTIVATION_BYTES = 3 * GIB
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen": {
        "image_model": "qwen_image", "patch_size": 2, "in_channels": 64, "out_channels": 16, "num_layers": 60,
        "attention_head_dim": 128, "num_attention_heads": 24, "joint_attention_dim": 3584,
        "axes_dims_rope": (16, 56, 56),
    },
    "flux": {
        "image_model": "flux", "in_channels": 16, "out_channels": 16, "vec_in_dim": 768,
        "context_in_dim": 4096, "hidden_size": 3072, "mlp_ratio": 4.0, "num_heads": 24, "depth": 19,
        "depth_single_blocks": 38, "axes_dim": [16, 56, 56], "theta": 10000, "patch_size": 2,
        "qkv_bias": True, "guidance_embed": True,
    },
}  # fmt: skip
TINY = {
    "qwen": {"num_layers": 6, "attention_head_dim": 16, "num_attention_heads": 3, "joint_attention_dim": 40,
             "axes_dims_rope": (4, 6, 6)},
    "flux": {"vec_in_dim": 24, "context_in_dim": 40, "hidden_size": 48, "num_heads": 3, "depth": 2,
             "depth_single_blocks": 4, "axes_dim": [4, 6, 6]},
}  # fmt: skip
CLASSES = {"qwen": "QwenImage", "flux": "Flux"}


def set_up(row: str, *, is_tiny: bool) -> None:
    """Load the pack and ComfyUI as a server started with this row's options would."""
    sys.path.insert(0, os.environ["COMFYUI_PATH"])
    spec = importlib.util.spec_from_file_location(
        "comfyui_ferry", ROOT / "__init__.py", submodule_search_locations=[str(ROOT)]
    )
    assert spec is not None and spec.loader is not None
    sys.modules["comfyui_ferry"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["comfyui_ferry"])
    import comfy.options
    from comfy.cli_args import args

    args.cpu = is_tiny
    if row == "comfyui async":
        args.async_offload = 2
    elif row != "comfyui dynamic":
        args.disable_async_offload = True
    if row == "comfyui dynamic":
        import comfy.memory_management
        import comfy.model_patcher
        import comfy_aimdo.control

        comfy_aimdo.control.init()
        if not comfy_aimdo.control.init_devices([0]):
            raise RuntimeError("comfy-aimdo does not work here")
        comfy.model_patcher.CoreModelPatcher = comfy.model_patcher.ModelPatcherDynamic
        comfy.memory_management.aimdo_enabled = True


def fill(module: torch.nn.Module) -> None:
    """Give every weight small random values: one piece of noise serves all."""
    piece = 0.02 * torch.randn(2**22)
    for tensor in (*module.parameters(), *module.buffers()):
        flat = tensor.detach().view(-1)
        for start in range(0, flat.numel(), piece.numel()):
            part = flat[start : start + piece.numel()]
            part.copy_(piece[: part.numel()])


def build(model: str, device: torch.device, row: str, *, is_tiny: bool) -> Any:
    """Return a ComfyUI MODEL with random weights on the host."""
    import comfy.model_patcher
    import comfy.supported_models
    from comfy.ldm.flux.model import FluxParams

    config = CONFIGS[model] | (TINY[model] if is_tiny else {})
    if model == "flux" and "txt_ids_dims" in FluxParams.__annotations__:
        config["txt_ids_dims"] = []
    settings = getattr(comfy.supported_models, CLASSES[model])(config)
    settings.set_inference_dtype(torch.bfloat16, None)
    base = settings.get_model({}, "")
    fill(base.diffusion_model)
    kind = "CoreModelPatcher" if row == "comfyui dynamic" else "ModelPatcher"
    patcher = getattr(comfy.model_patcher, kind)
    return patcher(base, load_device=device, offload_device=torch.device("cpu"))


def comfy_step(patcher: Any, model: str, device: torch.device, *, is_tiny: bool) -> Callable[[], None]:
    """Return one call of the diffusion model at 1024 x 1024."""
    side = 16 if is_tiny else 128
    config = CONFIGS[model] | (TINY[model] if is_tiny else {})
    kind = {"device": device, "dtype": torch.bfloat16}
    x = torch.randn(1, 16, *((1,) if model == "qwen" else ()), side, side, **kind)
    options: dict[str, Any] = {"transformer_options": {}}
    if model == "qwen":
        context = torch.randn(1, 128, config["joint_attention_dim"], **kind)
    else:
        context = torch.randn(1, 512, config["context_in_dim"], **kind)
        options |= {
            "y": torch.randn(1, config["vec_in_dim"], **kind),
            "guidance": torch.full((1,), 3.5, **kind),
        }
    timestep = torch.full((1,), 0.5, **kind)
    denoiser = patcher.model.diffusion_model
    return lambda: denoiser(x, timestep, context, **options)


def diffusers_step(model: str, device: torch.device, budget_bytes: int) -> tuple[Callable[[], None], int]:
    """Return one call of diffusers' class under group offloading with streams, and its bytes of weights."""
    import diffusers

    kind = {"device": device, "dtype": torch.bfloat16}
    with torch.device("meta"):
        if model == "qwen":
            module = diffusers.QwenImageTransformer2DModel(num_layers=60)
        else:
            module = diffusers.FluxTransformer2DModel(guidance_embeds=True)
    module = module.to(torch.bfloat16).to_empty(device="cpu").requires_grad_(False).eval()
    fill(module)
    nbytes = sum(parameter.numel() * 2 for parameter in module.parameters())
    blocks = 60 if model == "qwen" else 57
    module.enable_group_offload(
        onload_device=device, offload_device=torch.device("cpu"), offload_type="block_level",
        num_blocks_per_group=max(1, int(budget_bytes / 2 / (nbytes / blocks))), use_stream=True,
    )  # fmt: skip
    x, t = torch.randn(1, 4096, 64, **kind), torch.full((1,), 0.5, **kind)
    if model == "qwen":
        text = torch.randn(1, 128, 3584, **kind)
        mask = torch.ones(1, 128, device=device, dtype=torch.bool)
        call = {"encoder_hidden_states": text, "encoder_hidden_states_mask": mask, "timestep": t,
                "img_shapes": [[(1, 64, 64)]], "txt_seq_lens": [128]}  # fmt: skip
    else:
        call = {"encoder_hidden_states": torch.randn(1, 512, 4096, **kind), "timestep": t,
                "pooled_projections": torch.randn(1, 768, **kind), "guidance": torch.full((1,), 3.5, **kind),
                "img_ids": torch.zeros(4096, 3, **kind), "txt_ids": torch.zeros(512, 3, **kind)}  # fmt: skip
    return lambda: module(x, **call), nbytes


@contextlib.contextmanager
def only_free(device: torch.device, nbytes: int) -> Iterator[None]:
    """Occupy the GPU up to ``nbytes``."""
    free, _ = torch.cuda.mem_get_info(device)
    ballast = torch.empty(max(0, free - nbytes), dtype=torch.uint8, device=device)
    yield
    del ballast


def measure_link(device: torch.device) -> float:
    """Return bytes a second of pinned copies to the device."""
    is_cuda = device.type == "cuda"
    host = torch.zeros(256 * 2**20, dtype=torch.uint8, pin_memory=is_cuda)
    target = torch.empty_like(host, device=device)
    best = float("inf")
    for _ in range(6):
        best = min(best, timed(lambda: target.copy_(host, non_blocking=True), device))
    return host.numel() / best


def timed(step: Callable[[], Any], device: torch.device) -> float:
    """Return the seconds of one call."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def run_row(row: str, model: str, budget_bytes: int, *, steps: int, is_tiny: bool) -> dict[str, Any]:
    """Measure one row in this process."""
    set_up(row, is_tiny=is_tiny)
    device = torch.device("cpu") if is_tiny else torch.device("cuda", 0)
    result: dict[str, Any] = {"link": measure_link(device)} if row == "resident" else {}
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode())
        if row == "diffusers group":
            step, result["weight_bytes"] = diffusers_step(model, device, budget_bytes)
        else:
            patcher = build(model, device, row, is_tiny=is_tiny)
            result["weight_bytes"] = patcher.model_size()
            if row == "comfyui dynamic":
                stack.enter_context(only_free(device, budget_bytes + ACTIVATION_BYTES))
            patcher = load(patcher, row, budget_bytes)
            step = comfy_step(patcher, model, device, is_tiny=is_tiny)
        baseline = 0 if is_tiny else torch.cuda.mem_get_info(device)[0]
        times = [timed(step, device) for _ in range(2 + steps)][2:]
        if row == "ferry":
            stats = patcher.stream.streamer.stats()
            result |= {"weights_held": stats.target_bytes, "stall": stats.stall_share}
        result |= {"seconds": statistics.median(times), "low": min(times), "high": max(times)}
        if not is_tiny:
            result |= {"peak": torch.cuda.max_memory_allocated(device), "free_at_start": baseline}
    return result


def load(patcher: Any, row: str, budget_bytes: int) -> Any:
    """Bring the model to where the row's way of offloading has it."""
    if row == "ferry":
        from comfyui_ferry.core.comfy_adapter import offload_model

        patcher = offload_model(patcher, vram_gb=budget_bytes / GIB)
        patcher.partially_load(patcher.load_device, budget_bytes)
    elif row == "comfyui dynamic":
        import comfy.model_management

        comfy.model_management.load_models_gpu([patcher])
    else:
        patcher.partially_load(patcher.load_device, 1e32 if row == "resident" else budget_bytes)
    return patcher


def in_subprocess(arguments: list[str]) -> dict[str, Any]:
    """Return one row's result, or why it has none."""
    command = [sys.executable, __file__, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if lines:
        return json.loads(lines[-1].removeprefix("RESULT "))
    reason = (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1]
    return {"error": reason[:100]}


def main() -> None:
    """Run all rows and print a table, or one row (``--row``)."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=sorted(CONFIGS), default="qwen")
    parser.add_argument("--budgets", type=float, nargs="+", default=[4, 8, 16, 24], help="GB of 2**30 bytes")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rows", nargs="+", default=list(ROWS))
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--row")
    chosen = parser.parse_args()
    if chosen.row:
        budget = int(chosen.budgets[0] * GIB)
        result = run_row(chosen.row, chosen.model, budget, steps=chosen.steps, is_tiny=chosen.tiny)
        print("RESULT " + json.dumps(result), flush=True)
        return
    rows, budgets = chosen.rows, chosen.budgets
    common = ["--model", chosen.model, "--steps", str(chosen.steps)]
    if chosen.tiny:
        rows, budgets, common = ["ferry"], [0.001], [*common, "--tiny"]
    resident = in_subprocess([*common, "--row", "resident"])
    print(f"resident: {resident}", flush=True)
    print("| GB | way | s/step | range | x of limit | peak GiB |\n|---|---|---|---|---|---|", flush=True)
    for budget in budgets:
        moved = max(0.0, resident.get("weight_bytes", 0) - budget * GIB)
        limit = max(resident.get("seconds", 0.0), moved / resident.get("link", float("inf")))
        print(f"| {budget} | limit | {limit:.4f} | | 1 | |", flush=True)
        for row in rows:
            found = in_subprocess([*common, "--row", row, "--budgets", str(budget)])
            if "error" in found:
                print(f"| {budget} | {row} | {found['error']} | | | |", flush=True)
                continue
            times = f"{found['seconds']:.4f} | {found['low']:.4f} to {found['high']:.4f}"
            ratio = f"{found['seconds'] / limit:.3f}" if limit else "-"
            peak = f"{found['peak'] / GIB:.2f}" if "peak" in found else "-"
            print(f"| {budget} | {row} | {times} | {ratio} | {peak} |", flush=True)


if __name__ == "__main__":
    main()
