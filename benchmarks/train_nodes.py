"""Train LoRA (Offload) beside ComfyUI's own Train LoRA: same model, data and steps.

    python benchmarks/train_nodes.py --comfyui PATH --model flux --steps 5 --out results
    python benchmarks/train_nodes.py --comfyui PATH --model qwen-image --budgets 6 8 12 24 --rows ferry
    python benchmarks/train_nodes.py --comfyui PATH --model tiny --device cpu

Each row runs in a process of its own, so one that fails does not end the others; budgets of VRAM are tried
one after the other in one process, on one model. Seconds a step are taken between optimizer steps, after the
first ten (of the stock node: three); peaks are ``torch.cuda.max_memory_allocated`` of the whole run, with
what CUDA graphs keep for themselves, beside the peak that was planned, and the process's largest resident
set. The gradient error is that of all LoRA gradients of one step against plain autograd in fp32 with the LoRA
merged into the weights, for the inputs and the output gradient that the node used (FLUX models only).
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.utils.checkpoint
from gpu_memory import PeakOutsideGraphs, graph_pool_bytes
from torch.optim.optimizer import register_optimizer_step_pre_hook

ROOT = Path(__file__).resolve().parents[1]
FLUX = {
    "image_model": "flux", "in_channels": 16, "out_channels": 16, "vec_in_dim": 768, "context_in_dim": 4096,
    "hidden_size": 3072, "mlp_ratio": 4.0, "num_heads": 24, "depth": 19, "depth_single_blocks": 38,
    "axes_dim": [16, 56, 56], "theta": 10000, "patch_size": 2, "qkv_bias": True, "guidance_embed": True,
    "txt_ids_dims": [],
}  # fmt: skip
TINY = FLUX | {
    "vec_in_dim": 24, "context_in_dim": 40, "hidden_size": 48, "num_heads": 3, "depth": 2,
    "depth_single_blocks": 2, "axes_dim": [4, 6, 6],
}  # fmt: skip
QWEN = {
    "image_model": "qwen_image", "patch_size": 2, "in_channels": 64, "out_channels": 16, "num_layers": 60,
    "attention_head_dim": 128, "num_attention_heads": 24, "joint_attention_dim": 3584,
    "axes_dims_rope": (16, 56, 56),
}  # fmt: skip
# Configuration, dtype of the weights, latent side, text tokens.
MODELS = {
    "flux": (FLUX, torch.bfloat16, 128, 512),
    "qwen-image": (QWEN, torch.bfloat16, 128, 256),
    "tiny": (TINY, torch.float32, 8, 7),
}
ROWS = ("ferry", "ferry, weights on the GPU", "stock", "stock, offloading")
RANK = 16
# Ours: the residency plan is corrected by what the first six took; then blocks are recorded once more.
_WARM_UP_STEPS, _STOCK_WARM_UP_STEPS = 10, 3


def build(name: str, device: str) -> Any:
    """Return a MODEL with random weights."""
    import comfy.model_patcher
    import comfy.supported_models

    config, dtype, _, _ = MODELS[name]
    with torch.inference_mode():
        torch.manual_seed(0)
        is_qwen = config["image_model"] == "qwen_image"
        kind = comfy.supported_models.QwenImage if is_qwen else comfy.supported_models.Flux
        settings = kind(dict(config))
        settings.set_inference_dtype(dtype, None)
        model = settings.get_model({}, "")
        for parameter in model.diffusion_model.parameters():
            fill(parameter)
    patcher = comfy.model_patcher.CoreModelPatcher(
        model, load_device=torch.device(device), offload_device=torch.device("cpu")
    )
    # The stock node loads the model again through this.
    patcher.cached_patcher_init = (lambda disable_dynamic=False: build(name, device), ())
    return patcher


def fill(parameter: torch.Tensor) -> None:
    """Give a parameter random values; made on the GPU, if there is one, where it takes no time."""
    if torch.cuda.is_available():
        parameter.copy_(torch.empty_like(parameter, device="cuda").normal_(std=0.02))
    else:
        parameter.normal_(std=0.02)


def data(name: str) -> tuple[list[dict], list[list]]:
    """Return latents and captions."""
    config, _, side, tokens = MODELS[name]
    random = torch.Generator().manual_seed(1)
    latents = [{"samples": torch.randn(1, 16, side, side, generator=random)} for _ in range(2)]
    if config["image_model"] == "qwen_image":
        width = config["joint_attention_dim"]
        return latents, [[[torch.randn(1, tokens, width, generator=random), {}] for _ in range(2)]]
    captions = [
        [
            torch.randn(1, tokens, config["context_in_dim"], generator=random),
            {"pooled_output": torch.randn(1, config["vec_in_dim"], generator=random), "guidance": 1.0},
        ]
        for _ in range(2)
    ]
    return latents, [captions]


def run_node(row: str, model: Any, name: str, **changes: Any) -> dict[str, torch.Tensor]:
    """Execute one of the two nodes as ComfyUI does and return its LoRA."""
    latents, captions = data(name)
    dtype = "fp32" if MODELS[name][1] == torch.float32 else "bf16"
    if row.startswith("ferry"):
        from comfyui_ferry.nodes.training import TrainLoraOffload as Node

        widgets = {"offload": row == "ferry", "alpha": float(RANK), "save_prefix": ""}
    else:
        from comfy_extras.nodes_train import TrainLoraNode as Node

        widgets = {"offloading": row.endswith("offloading")}
    schema = Node.define_schema()
    values = {entry.id: entry.default for entry in schema.inputs if hasattr(entry, "default")}
    values |= {"rank": RANK, "training_dtype": dtype, "lora_dtype": "fp32", **widgets, **changes}
    if "existing_lora" in values:
        values["existing_lora"] = "[None]"
    lists = {key: [value] for key, value in values.items()}
    with torch.inference_mode():
        output = Node.execute(model=[model], latents=latents, positive=captions, **lists)
    return output.args[0]


class Watch:
    """Notes the inputs and the output gradient of the network, and the LoRA's values and gradients."""

    def __init__(self) -> None:
        self.calls: list[tuple[tuple, dict, list[torch.Tensor]]] = []
        self.adapters: dict[str, Any] = {}
        self.factors: dict[str, tuple[torch.Tensor, ...]] = {}

    def network(self, module: torch.nn.Module, args: tuple, kwargs: dict, output: torch.Tensor) -> None:
        """Forward hook of the network."""
        if output.requires_grad:
            gradients: list[torch.Tensor] = []
            output.register_hook(lambda gradient: gradients.append(gradient.detach().cpu().clone()))
            kept = {key: value for key, value in kwargs.items() if key != "transformer_options"}
            call = (_to_host(args), _to_host(kept), gradients)
            # Ours makes the first pass several times, to plan what stays on the GPU; one of them counts.
            if not (self.calls and torch.equal(self.calls[-1][0][0], call[0][0])):
                self.calls.append(call)
            else:
                self.calls[-1] = call

    def before_step(self, optimizer: Any, *rest: Any) -> None:
        """Optimizer hook."""
        for key, adapter in self.adapters.items():
            tensors = [getattr(adapter, name) for name in ("lora_up", "lora_down")]
            weights = [getattr(tensor, "weight", tensor) for tensor in tensors]
            if any(weight.grad is None for weight in weights):
                continue
            scale = float(adapter.alpha / adapter.rank) if hasattr(adapter, "alpha") else adapter.scale
            self.factors[key] = (
                torch.tensor(scale), *(part.detach().float().cpu().clone() for weight in weights
                                       for part in (weight, weight.grad)),
            )  # fmt: skip


def _to_host(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().float().cpu() if value.is_floating_point() else value.detach().cpu()
    if isinstance(value, dict):
        return {key: _to_host(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_to_host(item) for item in value)
    return value


def watch(row: str, model: Any, name: str) -> Watch:
    """Run one step and return what was seen."""
    import comfy.ldm.flux.model
    import comfy.model_patcher
    from comfyui_ferry.core.training import LoraAdapters

    seen = Watch()
    patcher, adapters = comfy.model_patcher.ModelPatcher, LoraAdapters
    originals = patcher.add_weight_wrapper, adapters.install

    def add_weight_wrapper(self: Any, key: str, function: Any) -> None:
        if hasattr(function, "lora_up"):
            seen.adapters[key.removeprefix("diffusion_model.").removesuffix(".weight")] = function
        originals[0](self, key, function)

    def install(self: Any) -> None:
        seen.adapters.update(self.adapters())
        originals[1](self)

    patcher.add_weight_wrapper, adapters.install = add_weight_wrapper, install
    handles = [register_optimizer_step_pre_hook(seen.before_step)]
    network_hook: Callable = lambda module, args, kwargs, output: (  # noqa: E731
        seen.network(module, args, kwargs, output) if isinstance(module, comfy.ldm.flux.model.Flux) else None
    )
    handles.append(torch.nn.modules.module.register_module_forward_hook(network_hook, with_kwargs=True))
    try:
        # Ours clips gradients unless told not to; both are compared as the backward left them.
        changes = {"max_grad_norm": 0.0} if row.startswith("ferry") else {}
        run_node(row, model, name, steps=1, optimizer="SGD", learning_rate=1e-6, **changes)
    finally:
        patcher.add_weight_wrapper, adapters.install = originals
        for handle in handles:
            handle.remove()
    return seen


def gradient_error(seen: Watch, name: str, device: str) -> float:
    """Return the error of all gradients against plain autograd in fp32, relative to their norm.

    The reference holds the network's weights in fp32, adds the LoRA to the layers' outputs and recomputes
    its blocks in the backward; it keeps no gradients of weights, which would not fit beside them.
    """
    import comfy.model_management
    from comfyui_ferry.core.training import OutOfPlace

    comfy.model_management.unload_all_models()
    comfy.model_management.soft_empty_cache()
    network = build(name, "cpu").model.diffusion_model
    # Plain autograd refuses the blocks' `img += ...`, and rope's own kernel has no gradient.
    OutOfPlace(network).install()
    comfy.model_management.in_training = True
    with torch.inference_mode(False):
        for owner in network.modules():  # made in inference mode, whose tensors autograd refuses
            for key, parameter in owner.named_parameters(recurse=False):
                value = parameter.detach().to(device, torch.float32).clone()
                setattr(owner, key, torch.nn.Parameter(value, requires_grad=False))
            for key, buffer in owner.named_buffers(recurse=False):
                setattr(owner, key, buffer.to(device, torch.float32).clone())
        for block in (*network.double_blocks, *network.single_blocks):
            block.forward = functools.partial(
                torch.utils.checkpoint.checkpoint, block.forward, use_reentrant=False
            )
        leaves = {
            key: [part.to(device).flatten(1).requires_grad_() for part in (up, down)]
            for key, (_, up, _, down, _) in seen.factors.items()
        }
        for key, (scale, *_) in seen.factors.items():
            layer = network.get_submodule(key)
            layer.register_forward_hook(_added_lora(float(scale), *leaves[key]))
        for args, kwargs, gradients in seen.calls:
            if gradients:
                moved = _moved((args, kwargs), device)
                output = network(*moved[0], **moved[1])
                output.backward(gradients[0].to(device, output.dtype))
    error = size = 0.0
    for key, (_, _, up_gradient, _, down_gradient) in seen.factors.items():
        for found, leaf in zip((up_gradient, down_gradient), leaves[key], strict=True):
            assert leaf.grad is not None
            expected = leaf.grad.float().cpu()
            error += float((found.reshape(expected.shape) - expected).square().sum())
            size += float(expected.square().sum())
    return (error / size) ** 0.5


def _added_lora(scale: float, up: torch.Tensor, down: torch.Tensor) -> Callable:
    """Return a forward hook of a linear layer that adds the LoRA's output."""

    def hook(module: torch.nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor:
        return output + scale * torch.nn.functional.linear(torch.nn.functional.linear(args[0], down), up)

    return hook


def _moved(value: Any, device: str) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: _moved(item, device) for key, item in value.items()}
    return type(value)(_moved(item, device) for item in value) if isinstance(value, list | tuple) else value


def settle_attention(name: str, device: str) -> None:
    """Make a process's first attention calls, of the model's shape, before either node trains.

    At a process's first call PyTorch takes cuDNN's kernel, whatever order ComfyUI asks for, and flash from
    the second on (torch 2.11, H200). The check of ``torch.utils.checkpoint`` in ComfyUI's node takes the
    first block's other kernel for an error.
    """
    from comfy.ldm.modules.attention import optimized_attention

    config, dtype, side, tokens = MODELS[name]
    heads = config.get("num_heads") or config["num_attention_heads"]
    width = config.get("hidden_size") or heads * config["attention_head_dim"]
    shape = (1, heads, tokens + (side // 2) ** 2, width // heads)
    for _ in range(2):
        q, k, v = (torch.zeros(shape, dtype=dtype, device=device, requires_grad=True) for _ in range(3))
        optimized_attention(q, k, v, heads, skip_reshape=True).sum().backward()


def child(
    row: str, name: str, device: str, steps: int, *, budgets: list[float], gradients: bool
) -> list[dict[str, Any]]:
    """Measure one row, once for each budget."""
    import comfy.ldm.flux.model

    settle_attention(name, device)
    model = build(name, device)
    results = []
    for budget in budgets:
        try:
            results.append(measure(row, model, name, device, steps, budget=budget))
        except (RuntimeError, ValueError) as error:  # too small a budget is an answer too
            print(f"# {row}, {budget} GB: {error}", file=sys.stderr, flush=True)
            continue
        print(f"# {table_line(row, results[-1])}", file=sys.stderr, flush=True)
        if gradients and isinstance(model.model.diffusion_model, comfy.ldm.flux.model.Flux):
            results[-1]["gradient_error"] = gradient_error(watch(row, model, name), name, device)
    return results


def measure(row: str, model: Any, name: str, device: str, steps: int, *, budget: float) -> dict[str, Any]:
    """Run the node once and return its figures."""
    moments: list[float] = []
    planned: list[int] = []
    peak = PeakOutsideGraphs()
    pool_bytes = 0
    warm_up = _WARM_UP_STEPS if row.startswith("ferry") else _STOCK_WARM_UP_STEPS

    def before_step(optimizer: Any, *rest: Any) -> None:
        nonlocal pool_bytes
        if device == "cuda":
            torch.cuda.synchronize()
            if len(moments) >= warm_up:
                pool_bytes = max(pool_bytes, graph_pool_bytes())
        moments.append(time.perf_counter())

    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    handle = register_optimizer_step_pre_hook(before_step)
    try:
        with noted_plans(planned), peak.watching():
            changes = {"vram_budget_gb": budget} if row == "ferry" else {}
            run_node(row, model, name, steps=warm_up + steps, **changes)
    finally:
        handle.remove()
    return {
        "vram_budget_gb": budget or None,
        "seconds_per_step": (moments[-1] - moments[-1 - steps]) / steps,
        "peak_vram_gb": (peak.read() + pool_bytes) / 1e9 if device == "cuda" else 0.0,
        "planned_vram_gb": planned[-1] / 1e9 if planned else None,
        "peak_ram_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


@contextlib.contextmanager
def noted_plans(planned: list[int]) -> Iterator[None]:
    """Append the planned peak of our node whenever it reports its progress."""
    from comfyui_ferry.core.comfy_adapter.running_trainings import RunningTraining

    original = RunningTraining.tell

    def tell(self: Any, progress: Any, *, now: bool = False) -> None:
        if progress.gpu_planned_bytes is not None:
            planned.append(progress.gpu_planned_bytes)
        original(self, progress, now=now)

    RunningTraining.tell = tell
    try:
        yield
    finally:
        RunningTraining.tell = original


def load(comfyui: Path, device: str) -> None:
    """Make ComfyUI and the pack importable."""
    sys.path.insert(0, str(comfyui))
    import comfy.options  # noqa: F401
    from comfy.cli_args import args

    args.cpu = device == "cpu"
    import utils.extra_config  # noqa: F401

    spec = importlib.util.spec_from_file_location(
        "comfyui_ferry", ROOT / "__init__.py", submodule_search_locations=[str(ROOT)]
    )
    assert spec is not None and spec.loader is not None
    sys.modules["comfyui_ferry"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["comfyui_ferry"])


def main() -> None:
    """Run every row, or the one that the parent asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--comfyui", type=Path, required=True, help="a checkout of ComfyUI 0.33")
    parser.add_argument("--model", choices=list(MODELS), default="flux")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--out", type=Path, help="folder for train_nodes.json and train_nodes.md")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument(
        "--budgets", nargs="+", type=float, default=[0.0], help="GB of VRAM for ferry; 0: auto"
    )
    parser.add_argument(
        "--no-gradient-error", action="store_true", help="it takes the model once more, in fp32"
    )
    parser.add_argument("--row", choices=ROWS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    gradients = not options.no_gradient_error
    if options.row:
        load(options.comfyui.resolve(), options.device)
        budgets = options.budgets if options.row == "ferry" else [0.0]
        found = child(
            options.row, options.model, options.device, options.steps, budgets=budgets, gradients=gradients
        )
        print(json.dumps(found))
        return
    results: dict[str, Any] = {}
    lines = [
        "| node | VRAM budget GB | s/step | peak VRAM GB | planned GB | peak RAM GiB | gradient error |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in options.rows:
        command = [sys.executable, os.path.abspath(__file__), "--row", row, "--comfyui", str(options.comfyui)]
        command += ["--model", options.model, "--device", options.device, "--steps", str(options.steps)]
        command += ["--budgets", *map(str, options.budgets), *["--no-gradient-error"][: not gradients]]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        print(*(line for line in ran.stderr.splitlines() if line.startswith("#")), sep="\n", file=sys.stderr)
        try:
            found = results[row] = json.loads(ran.stdout.splitlines()[-1])
            lines += [table_line(row, result) for result in found]
        except (IndexError, json.JSONDecodeError):
            results[row] = {"failed": ran.stderr[-2000:]}
            print(ran.stderr[-2000:], file=sys.stderr)
            lines.append(f"| {row} | failed | | | | | |")
        print(lines[-1], file=sys.stderr)
    print("\n".join(lines))
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "train_nodes.json").write_text(json.dumps(results, indent=2) + "\n")
        (options.out / "train_nodes.md").write_text("\n".join(lines) + "\n")


def table_line(row: str, result: dict[str, Any]) -> str:
    """Return one line of the table."""
    names = ("vram_budget_gb", "seconds_per_step", "peak_vram_gb", "planned_vram_gb", "peak_ram_gib")
    cells = ["" if result[name] is None else f"{result[name]:.3f}" for name in names]
    error = result.get("gradient_error")
    return f"| {row} | {' | '.join(cells)} | {'' if error is None else f'{error:.1e}'} |"


if __name__ == "__main__":
    main()
