"""Host memory of ComfyUI and its CPU workers from a file to a picture: the peak and what stays.

    COMFYUI_PATH=... python benchmarks/worker_memory.py [--megabytes 400] [--lora] [--fp8] [--quantized FORM]
        [--mesh ulysses=2] [--share 0.5]

A Wan-like model of random weights is written to a file, loaded by a loader, made parallel over two workers
and sampled once, while the proportional set size (PSS) of all processes together is read every 10 ms. What
they take besides is measured before, with a model of no size, and subtracted. Every row runs in a process of
its own. ``--lora`` patches every Linear layer. CPU workers hold patched weights in ordinary memory, those
on GPUs hold them in the GPU's; in the row with a budget weights stream, and a block is patched as it comes.
``--quantized`` writes a file as newer ComfyUI quantizes (``float8_e4m3fn``). ``--mesh tensor=2`` cuts
them. ``--share`` says how much of the file the row with a budget lets each worker hold; what it held
(elsewhere a GPU's memory) is printed and counted in.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import importlib.util
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
ROWS = ("stock loader", "offload loader", "offload loader, budget")


def set_up() -> None:
    """Load the pack, its test helpers and ComfyUI."""
    sys.path.insert(0, os.environ["COMFYUI_PATH"])
    for alias, folder in (("comfyui_ferry", ROOT), ("ferry_support", ROOT / "tests" / "support")):
        init = folder / "__init__.py"
        spec = importlib.util.spec_from_file_location(alias, init, submodule_search_locations=[str(folder)])
        assert spec is not None and spec.loader is not None
        sys.modules[alias] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[alias])
    from comfy.cli_args import args

    args.cpu = True
    import utils.extra_config  # noqa: F401  (before `nodes`, which puts another `utils` first)


def pss_bytes() -> int:
    """Return the memory of this process and all below it, a shared page counted once."""
    total = 0
    for pid in [os.getpid(), *children(os.getpid())]:
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            total += sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total


def children(pid: int) -> list[int]:
    found = []
    for task in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(OSError):
            found += [int(each) for each in Path(f"/proc/{pid}/task/{task}/children").read_text().split()]
    return [each for child in found for each in (child, *children(child))]


@contextlib.contextmanager
def watching() -> Iterator[dict[str, int]]:
    """Note the peak while the block runs."""
    seen, stop = {"peak": 0}, threading.Event()

    def look() -> None:
        while not stop.is_set():
            seen["peak"] = max(seen["peak"], pss_bytes())
            time.sleep(0.01)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield seen
    finally:
        stop.set()
        thread.join()


def degrees(mesh: str) -> dict[str, int]:
    """Return the inputs of Parallel Model for ``tensor=2,ulysses=2``."""
    asked = {"cfg": 1, "ulysses": 1, "tensor_parallel": 1}
    for each in mesh.split(","):
        name, _, size = each.partition("=")
        asked["tensor_parallel" if name == "tensor" else name] = int(size)
    return {"gpus": math.prod(asked.values()), **{f"{name}_degree": size for name, size in asked.items()}}


def load(row: str, name: str, *, fp8: bool, budget: float) -> Any:
    import folder_paths
    from comfyui_ferry.core.comfy_adapter import load_offloaded

    import nodes

    dtype = "fp8_e4m3fn" if fp8 else "default"
    with torch.inference_mode():
        if row == "stock loader":
            return nodes.UNETLoader().load_unet(name, dtype)[0]
        path = folder_paths.get_full_path("diffusion_models", name)
        share = budget * os.path.getsize(path) / 2**30 if "budget" in row else 0.0
        return load_offloaded(name, weight_dtype=dtype, vram_gb=share, prefetch_depth=0)


def run(row: str, folder: str, *, lora: bool, fp8: bool, mesh: str, share: float) -> None:
    """Measure one row and print it."""
    set_up()
    import folder_paths
    from comfyui_ferry.core.comfy_adapter import close_workers, worker_groups
    from ferry_support.sampling import parallel, sample, with_lora
    from ferry_support.tiny_patchers import PATCHERS

    torch.set_num_threads(1)
    folder_paths.add_model_folder_path("diffusion_models", folder)

    def picture(model: Any) -> None:
        prompt = [[torch.zeros(1, 7, model.model.diffusion_model.text_embedding[0].in_features), {}]]
        prompts = {"positive": prompt, "negative": prompt}
        model = parallel(with_lora(model, everywhere=True) if lora else model, degrees(mesh))
        sample(model, "wan", steps=1, cfg=1.0, conditioning=prompts)

    def settle() -> int:
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        return pss_bytes()

    picture(PATCHERS["wan"].build(dim=48, num_heads=4))
    base, size = settle(), os.path.getsize(Path(folder, "model.safetensors"))
    with watching() as loading:
        model = load(row, "model.safetensors", fp8=fp8, budget=share)
    loaded = settle()
    with watching() as working:
        picture(model)
    end = settle()
    if fp8:  # of a file in another dtype
        size = sum(each.nbytes for each in model.model.diffusion_model.state_dict().values())
    held = [each.num_bytes for each in worker_groups._current.loaded.values() if each.streams]
    parts = [(value - base) / size for value in (loading["peak"], loaded, working["peak"], end)]
    print(f"{row:24} {size / 1e6:6.0f} MB; while loading {parts[0]:.2f}x, loaded {parts[1]:.2f}x; "
          f"made parallel and sampled: peak {parts[2]:.2f}x, after {parts[3]:.2f}x"
          + "".join(f"; each worker held {each / size:.3f}x" for each in held))  # fmt: skip
    close_workers()


def write_model(folder: str, megabytes: int, form: str) -> None:
    set_up()
    from ferry_support.tiny_patchers import PATCHERS
    from safetensors.torch import save_file

    layers = max(1, round(megabytes / 38))
    model = PATCHERS["wan"].build(
        dim=768, ffn_dim=3072, num_heads=12, num_layers=layers, text_dim=4096, freq_dim=256
    )
    module = model.model.diffusion_model
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    if form:
        from ferry_support.quantized_patchers import quantized_state

        state = quantized_state(module, form)
    save_file(state, os.path.join(folder, "model.safetensors"))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=int, default=400)
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--fp8", action="store_true")
    parser.add_argument("--quantized", default="")
    parser.add_argument("--mesh", default="ulysses=2")
    parser.add_argument("--share", type=float, default=0.5)
    parser.add_argument("--rows", nargs="+", default=list(ROWS))
    parser.add_argument("--row")
    parser.add_argument("--folder")
    arguments = parser.parse_args()
    sys.argv = sys.argv[:1]
    if arguments.row == "write":
        write_model(arguments.folder, arguments.megabytes, arguments.quantized)
    elif arguments.row:
        how = {name: getattr(arguments, name) for name in ("lora", "fp8", "mesh", "share")}
        run(arguments.row, arguments.folder, **how)
    else:
        flags = [flag for flag in ("lora", "fp8") if getattr(arguments, flag)]
        print(arguments.megabytes, "MB", *flags, arguments.quantized, arguments.mesh, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            for row in ("write", *arguments.rows):
                command = [sys.executable, __file__, "--row", row, "--folder", folder]
                command += ["--megabytes", str(arguments.megabytes), *(f"--{flag}" for flag in flags)]
                command += ["--mesh", arguments.mesh, "--share", str(arguments.share)]
                command += ["--quantized", arguments.quantized] if row == "write" else []
                subprocess.run(command, check=True, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
