"""Seconds a step of parallel denoisers, beside ComfyUI on one GPU and diffusers on the same GPUs.

    python benchmarks/parallel.py --comfyui PATH qwen-image --size 2048x2048 --mesh ulysses=2 --mesh ring=2 \
        --mesh cfg=2 --mesh tp=2 --modes eager graph --rivals --out results

Every row runs in processes of its own, one after the other, with the same random weights and inputs. A mesh
is a product such as ``cfg=2,ulysses=2``. Time: median and range of the steps after warm-up, the slowest
rank's. A step with ``cfg`` above 1 is that many evaluations, on one GPU too. *difference*: the greatest
difference from ComfyUI's one-GPU output over its greatest value. *predicted*: the speed-up by the planner's
cost model, for links of ``--link`` GB/s and one GPU as fast as measured here.

With ``--rivals`` diffusers' class is timed on one GPU and on every mesh of Ulysses or Ring alone, eager, and
compiled where a mode compiles: with the attention that PyTorch chooses (its default, which has no Ring) and
with cuDNN's, which our workers use on Hopper.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from comfyui_ferry.core.parallel import (
    AttentionWork,
    CompiledBlocks,
    DenoiserWork,
    Machine,
    ParallelDims,
    RecordedForward,
    build_mesh,
    count_work,
    parallelize,
    predict,
    with_cudnn,
)
from comfyui_ferry.core.plans import find_plan
from parallel_models import DENOISERS, Denoiser, Size
from safetensors.torch import load_file, save_file

GIB = 2**30
_LIMIT_S = 540


def main() -> None:
    """Run what was asked for, or one rank of it."""
    parser = model_parser(__doc__, steps=5)
    parser.add_argument("--mesh", action="append", default=[], help="for example ulysses=2 or cfg=2,tp=2")
    parser.add_argument(
        "--modes", nargs="+", choices=["eager", "graph", "compile", "compile+graph"], default=["eager"]
    )
    parser.add_argument("--rivals", action="store_true", help="diffusers beside, where it can")
    parser.add_argument("--link", type=float, default=300.0, help="GB/s to other GPUs, for the prediction")
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--row", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.size = [parse_size(text) for text in options.size or ["1024x1024"]]
    if options.row:
        run_rank_reported(options, json.loads(options.row))
    else:
        run_all(options)


def model_parser(description: str | None, *, steps: int) -> argparse.ArgumentParser:
    """Return a command line with the model, where ComfyUI is, sizes, steps and the device."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", choices=list(DENOISERS))
    parser.add_argument("--comfyui", type=Path, required=True)
    parser.add_argument("--size", action="append", help="WIDTHxHEIGHT or WIDTHxHEIGHTxFRAMES; several times")
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    return parser


def parse_size(text: str) -> Size:
    """Return the size that ``1024x1024`` or ``832x480x81`` stands for."""
    return Size(*(int(number) for number in text.split("x")))


def parse_mesh(text: str) -> dict[str, int]:
    """Return the degrees that ``cfg=2,ulysses=2`` stands for."""
    return {name: int(degree) for name, degree in (part.split("=") for part in text.split(","))}


def run_all(options: argparse.Namespace) -> None:
    """Run every row in processes of its own and print the table."""
    options.out.mkdir(parents=True, exist_ok=True)
    results = []
    with tempfile.TemporaryDirectory() as shared:
        for row in rows(options):
            for result in run_row(options, row, Path(shared)):
                results.append(result)
                print(f"# {result}", flush=True)
    device = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    header = f"{device}, torch {torch.__version__}, {datetime.date.today()}, {' '.join(sys.argv)}"
    text = f"{header}\n\n{table(results, options.link * 1e9)}\n"
    print(text)
    (options.out / f"parallel_{options.model}.md").write_text(text)
    (options.out / f"parallel_{options.model}.json").write_text(json.dumps(results, indent=1))


def rows(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return what to run: one GPU first, since the others are compared with it."""
    meshes = [parse_mesh(text) for text in options.mesh]
    found = [{"who": "ComfyUI", "mesh": {}, "mode": "eager"}]
    found += [{"who": "ours", "mesh": mesh, "mode": mode} for mesh in meshes for mode in options.modes]
    if options.rivals and DENOISERS[options.model].rival is not None:
        # It has no CUDA graphs, so a recorded row is compared with its eager one.
        modes = dict.fromkeys("compile" if "compile" in mode else "eager" for mode in options.modes)
        rival = [{}, *(mesh for mesh in meshes if set(mesh) in ({"ulysses"}, {"ring"}))]
        for mesh, mode in itertools.product(rival, modes):
            attentions = attentions_of_rival(options, mesh, mode)
            found.append({"who": "diffusers", "mesh": mesh, "mode": mode, "attentions": attentions})
    return found


def attentions_of_rival(options: argparse.Namespace, mesh: dict[str, int], mode: str) -> list[str]:
    """Return diffusers' attention backends to measure: Ring needs one that reports its log-sum-exp."""
    if options.device == "cpu":
        return ["native"]
    # Each backend is another compilation, and cuDNN's is the faster one.
    return ["_native_cudnn"] if "ring" in mesh or mode == "compile" else ["native", "_native_cudnn"]


def run_row(options: argparse.Namespace, row: dict[str, Any], shared: Path) -> list[dict[str, Any]]:
    """Start the ranks of one row and return what they report; a row that fails does not end the run.

    Returns:
        One result, or one for each of diffusers' attention backends.
    """
    world_size = 1
    for degree in row["mesh"].values():
        world_size *= degree
    row = row | {"world_size": world_size, "shared": str(shared)}
    report = shared / "report.json"
    report.unlink(missing_ok=True)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={world_size}",
    ]
    command += [__file__, *sys.argv[1:], "--row", json.dumps(row)]
    try:
        run = subprocess.run(command, timeout=_LIMIT_S, capture_output=True, text=True)
        failure = run.stderr[-2000:]
    except subprocess.TimeoutExpired:
        failure = f"not done within {_LIMIT_S} s"
    shown = {name: row[name] for name in ("who", "mesh", "mode")}
    reports = json.loads(report.read_text()) if report.exists() else [{"failure": failure}]
    return [shown | found for found in reports]


def run_rank_reported(options: argparse.Namespace, row: dict[str, Any]) -> None:
    """Be one rank; an error that no rank reported before is the report."""
    try:
        run_rank(options, row)
    except Exception:
        report = Path(row["shared"]) / "report.json"
        if not report.exists():
            report.write_text(json.dumps([{"failure": traceback.format_exc()[-2000:]}]))
        raise


def run_rank(options: argparse.Namespace, row: dict[str, Any]) -> None:
    """Be one rank of one row; rank 0 writes the report."""
    device, dtype = join_group(options)
    denoiser = DENOISERS[options.model]
    reports: list[dict[str, Any]] = []
    if row["who"] == "diffusers":
        model, steps = rival_steps(denoiser, row, device, dtype)
        for attention in row["attentions"]:
            model.set_attention_backend(attention)
            who = f"diffusers, {'cuDNN' if 'cudnn' in attention else 'default'} attention"
            reports.append({"who": who, "sizes": measure_sizes(steps, options, row, device)})
    else:
        sizes = measure_sizes(our_steps(denoiser, row, device, dtype), options, row, device)
        if row["who"] == "ComfyUI":
            for size in options.size:
                sizes[str(size)]["work"] = asdict(work_of(denoiser, size, dtype))
        reports.append({"sizes": sizes})
    if dist.get_rank() == 0:
        (Path(row["shared"]) / "report.json").write_text(json.dumps(reports))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # a process group with recorded collectives does not end


def join_group(options: argparse.Namespace) -> tuple[torch.device, torch.dtype]:
    """Make ComfyUI importable and join the group of all ranks.

    Args:
        options: From ``model_parser``.

    Returns:
        This rank's device, and the dtype that models have on it.
    """
    sys.argv = sys.argv[:1]
    sys.path.insert(0, str(options.comfyui.resolve()))
    if options.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
        return device, torch.bfloat16
    from comfy.cli_args import args

    args.cpu = True
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    return torch.device("cpu"), torch.float32


Steps = Callable[[Size, int], Callable[[], torch.Tensor]]


def measure_sizes(
    steps: Steps, options: argparse.Namespace, row: dict[str, Any], device: torch.device
) -> dict[str, dict[str, Any]]:
    """Return what was measured of each size, by its name."""
    return {str(size): measure_size(steps, size, options, row, device) for size in options.size}


def measure_size(
    steps: Steps, size: Size, options: argparse.Namespace, row: dict[str, Any], device: torch.device
) -> dict[str, Any]:
    """Return time, memory and difference of one size; the same numbers on every rank."""
    report: dict[str, Any] = {}
    counts = [row["mesh"].get("cfg", 1)]
    if row["who"] == "ComfyUI" and any("cfg" in mesh for mesh in options.mesh):
        counts = [1, 2]  # what cfg=2 is compared with
    for conditionings in counts:
        step = steps(size, conditionings)
        step()
        output = step()  # a recorded one is written anew by each replay
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        seconds = [slowest(timed(step, device), device) for _ in range(options.steps)]
        report[f"seconds {conditionings}"] = seconds
        if conditionings == 1 or row["who"] != "ComfyUI":
            report["difference"] = compare(output, size, row)
    peak = torch.cuda.max_memory_allocated() / GIB if device.type == "cuda" else 0.0
    report["peak_gib"] = gathered(peak)
    report["host_pss_gib"] = gathered(pss_gib())
    return report


def timed(step: Callable[[], Any], device: torch.device) -> float:
    """Return the seconds of one step, all ranks starting together."""
    dist.barrier()
    start = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def slowest(seconds: float, device: torch.device) -> float:
    """Return the greatest value of all ranks."""
    value = torch.tensor([seconds], device=device)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return value.item()


def gathered(value: float) -> list[float]:
    """Return every rank's value, rounded."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, round(value, 2))
    return values


def pss_gib() -> float:
    """Return this process' share of the host memory that it uses."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024 / GIB
    return 0.0


def compare(output: torch.Tensor, size: Size, row: dict[str, Any]) -> float | None:
    """Return the relative difference from ComfyUI's one-GPU output, which is kept when it comes by."""
    kept = Path(row["shared"]) / f"{size.width}x{size.height}x{size.frames}.safetensors"
    if row["who"] == "diffusers":
        return None  # another class with other weights
    if row["who"] == "ComfyUI":
        save_file({"output": output.cpu().contiguous()}, kept)
        return 0.0
    reference = load_file(kept)["output"].float()
    return ((output.cpu().float() - reference).abs().max() / reference.abs().max()).item()


def our_steps(denoiser: Denoiser, row: dict[str, Any], device: torch.device, dtype: torch.dtype) -> Steps:
    """Return steps of ComfyUI's class, by itself or in parallel."""
    model = denoiser.build(device, dtype)
    forward = getattr(model, "_forward", model)
    options: dict[str, Any] = {}
    call, branch, agree = forward, 0, None
    dims = ParallelDims(**row["mesh"])
    if row["who"] == "ours":
        layout = build_mesh(dims)
        plan = find_plan(f"{type(model).__module__}.{type(model).__qualname__}")
        handle = parallelize(model, plan, group=layout.sequence_group, tensor_group=layout.tensor_group)
        # As workers do it: see core/comfy_adapter/worker_forward.py.
        override = handle.attention_override
        if device.type == "cuda":
            override = with_cudnn(override, plain_attention())
        if row["mode"].startswith("compile"):
            override = CompiledBlocks(model, plan).attention_override(override)
        options["optimized_attention_override"] = override
        branch, agree = layout.cfg_branch, functools.partial(handle.agree, device=device)

        def call(**inputs: Any) -> torch.Tensor:
            return handle.run(forward, **inputs)

    def steps(size: Size, conditionings: int) -> Callable[[], torch.Tensor]:
        prompts = range(conditionings) if dims.cfg == 1 else [branch]
        calls = [to_device(denoiser.inputs(size, prompt), device, dtype) for prompt in prompts]

        def evaluate(arguments: dict[str, Any]) -> torch.Tensor:
            outputs = [call(**inputs, transformer_options=dict(options)) for inputs in arguments["calls"]]
            return branches_together(outputs[0], dims.cfg)[0]

        run = RecordedForward(evaluate, agree=agree) if row["mode"].endswith("graph") else evaluate
        return torch.inference_mode()(lambda: run({"calls": calls}))

    return steps


def work_of(denoiser: Denoiser, size: Size, dtype: torch.dtype) -> DenoiserWork:
    """Return what one evaluation costs, counted on the meta device."""
    meta = torch.device("meta")
    model = denoiser.build(meta, dtype)
    inputs = to_device(denoiser.inputs(size, 0), meta, dtype)

    def call(override: Any) -> torch.Tensor:
        return getattr(model, "_forward", model)(
            **inputs, transformer_options={"optimized_attention_override": override}
        )

    return count_work(model, find_plan(f"{type(model).__module__}.{type(model).__qualname__}"), call)


def predicted_speed_up(
    alone: dict[str, Any], mesh: dict[str, int], conditionings: int, link_bytes_per_s: float
) -> float:
    """Return the cost model's speed-up, with the speed of one GPU set to what was measured."""
    counts = alone["work"]
    calls = tuple(AttentionWork(**call) for call in counts["attention"])
    work = DenoiserWork(**counts | {"attention": calls, "conditionings": conditionings})
    flops = work.linear_flops + sum(call.flops for call in calls)
    speed = flops / statistics.median(alone["seconds 1"])
    dims = ParallelDims(**mesh)
    # Here no call goes to a worker process, so none is dispatched.
    machine = Machine(dims.world_size, 2**50, speed, speed, link_bytes_per_s, dispatch_s=0.0)
    return predict(work, machine, ParallelDims()).step_s / predict(work, machine, dims).step_s


def branches_together(output: torch.Tensor, branches: int) -> list[torch.Tensor]:
    """Return the outputs of all conditionings, which guidance needs in one place."""
    if branches == 1:
        return [output]
    parts = [torch.empty_like(output) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, output.contiguous())
    return parts[:: len(parts) // branches]


def plain_attention() -> frozenset[Callable[..., torch.Tensor]]:
    """Return ComfyUI's attention by PyTorch, as its overrides are called with it."""
    from comfy.ldm.modules.attention import attention_pytorch

    return frozenset({attention_pytorch, getattr(attention_pytorch, "__wrapped__", attention_pytorch)})


def rival_steps(
    denoiser: Denoiser, row: dict[str, Any], device: torch.device, dtype: torch.dtype
) -> tuple[Any, Steps]:
    """Return diffusers' model and steps of it, by itself or with its context parallelism."""
    from diffusers import ContextParallelConfig

    assert denoiser.rival is not None and denoiser.rival_inputs is not None
    model: Any = denoiser.rival(device, dtype)
    inputs_of = denoiser.rival_inputs
    if row["mesh"]:
        degrees = {f"{name}_degree": degree for name, degree in row["mesh"].items()}
        model.enable_parallelism(config=ContextParallelConfig(**degrees))
    if row["mode"] == "compile":
        model.compile_repeated_blocks(dynamic=False)

    def steps(size: Size, conditionings: int) -> Callable[[], torch.Tensor]:
        inputs = to_device(inputs_of(size, 0), device, dtype)

        @torch.no_grad()
        def step() -> torch.Tensor:
            return model(**inputs)[0]

        return step

    return model, steps


def to_device(inputs: dict[str, Any], device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Return the inputs on the device; tokens in the model's dtype, scalars as they are."""

    def moved(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        wide = value.is_floating_point() and value.ndim > 1
        return value.to(device, dtype) if wide else value.to(device)

    return {name: moved(value) for name, value in inputs.items()}


def line(
    result: dict[str, Any],
    size: str,
    mesh: str,
    conditionings: int,
    alone: dict[str, Any],
    link_bytes_per_s: float,
) -> str:
    """Return one line of the table."""
    report = result["sizes"][size]
    seconds = report[f"seconds {conditionings}"]
    median = statistics.median(seconds)
    base = statistics.median(alone[f"seconds {conditionings}"])
    predicted = ""
    if result["who"] == "ours":
        predicted = f"{predicted_speed_up(alone, result['mesh'], conditionings, link_bytes_per_s):.2f}"
    cells = [
        size + (" (2 prompts)" if conditionings == 2 else ""),
        result["who"],
        mesh,
        result["mode"],
        f"{median:.4f} s ({min(seconds):.4f} to {max(seconds):.4f})",
        f"{base / median:.2f}",
        predicted,
        "" if report["difference"] is None else f"{report['difference']:.1e}",
        ", ".join(f"{peak:.1f}" for peak in report["peak_gib"]),
        f"{sum(report['host_pss_gib']):.1f}",
    ]
    return f"| {' | '.join(cells)} |"


def table(results: list[dict[str, Any]], link_bytes_per_s: float) -> str:
    """Return the results as markdown; speed-ups are over ComfyUI's one GPU."""
    lines = [
        "| size | who | GPUs | mode | step, median (range) | speed-up | predicted | difference "
        "| peak GiB of each GPU | host GiB of all |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    alone = results[0].get("sizes", {})
    for result in results:
        mesh = " x ".join(f"{name} {degree}" for name, degree in result["mesh"].items()) or "1"
        if "failure" in result:
            lines.append(f"| all | {result['who']} | {mesh} | {result['mode']} | failed | | | | | |")
        for size, report in result.get("sizes", {}).items():
            for count in (int(name.split()[1]) for name in report if name.startswith("seconds")):
                lines.append(line(result, size, mesh, count, alone[size], link_bytes_per_s))
    return "\n".join(lines)


if __name__ == "__main__":
    main()
