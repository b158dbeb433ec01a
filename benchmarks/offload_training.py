"""Seconds a step and peak GPU memory of training with offload, beside its rivals, in one run.

    pip download --no-deps diffsynth==2.1.12 && unzip -d diffsynth_wheel diffsynth-*.whl
    git clone https://github.com/kohya-ss/musubi-tuner
    python benchmarks/offload_training.py toy  --rival diffsynth=diffsynth_wheel --repeat 3 --out results
    python benchmarks/offload_training.py qwen --rival diffsynth=diffsynth_wheel --rival musubi=musubi-tuner
    python benchmarks/offload_training.py toy --device cpu --tiny        # tries the script without a GPU

Every row runs in a process of its own, ``--repeat`` times, so one that fails or is out of memory ends
no other. A row is the median over all repeats' timed steps, with their range; the peak is the highest
``torch.cuda.max_memory_allocated`` in them of any repeat, and what CUDA graphs keep for themselves.
``--out`` receives the table and every single time.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from gpu_memory import graph_pool_bytes
from offload_rows import RIVALS, ROWS, Job

MARK = "RESULT "


def run_row(job: Job, *, warm_up: int, steps: int) -> dict[str, Any]:
    """Build the row's step, time it, and return what was seen."""
    is_cuda = torch.device(job.device).type == "cuda"
    torch.manual_seed(0)
    begin = time.perf_counter()
    step = job.build()
    build_s = time.perf_counter() - begin
    seconds = []
    for index in range(warm_up + steps):
        if is_cuda:
            torch.cuda.synchronize()
            if index == warm_up:
                torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        step()
        if is_cuda:
            torch.cuda.synchronize()
        if index >= warm_up:
            seconds.append(time.perf_counter() - begin)
    result: dict[str, Any] = {"seconds": seconds, "build_s": build_s}
    if is_cuda:
        result["peak_bytes"] = torch.cuda.max_memory_allocated() + graph_pool_bytes()
        result["reserved_bytes"] = torch.cuda.max_memory_reserved()
        result["device"] = torch.cuda.get_device_name()
    if job.recorded is not None:
        result["recordings"], result["obstacles"] = job.recorded.num_recordings, job.recorded.obstacles
    if job.manager is not None:
        result["ahead"] = job.ahead
        result["stats"] = {**dataclasses.asdict(job.manager.stats()), "bound": job.manager.stats().bound}
        plan = job.manager.tuner.plan if job.manager.tuner is not None else None
        if plan is not None:
            result["plan"] = {"text": plan.describe(), **dataclasses.asdict(plan.prediction)}
    return result


def start_row(arguments: argparse.Namespace, row: str, pixels: int) -> dict[str, Any]:
    """Run one row in a new process and return its result, or ``{"error": ...}``."""
    command = [sys.executable, __file__, arguments.work, "--row", row, "--pixels", str(pixels)]
    command += ["--device", arguments.device, "--warm-up", str(arguments.warm_up)]
    command += ["--steps", str(arguments.steps), "--budget-gb", str(arguments.budget_gb)]
    command += [part for rival in arguments.rival for part in ("--rival", rival)]
    command += ["--tiny"] if arguments.tiny else []
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=arguments.timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {arguments.timeout_s} s"}
    for line in done.stdout.splitlines():
        if line.startswith(MARK):
            return json.loads(line.removeprefix(MARK))
    errors = done.stderr.strip().splitlines()
    print(done.stderr[-4000:], file=sys.stderr)
    return {"error": f"exit {done.returncode}: {errors[-1] if errors else 'no output'}"}


def summarize(name: str, results: list[dict[str, Any]]) -> str:
    """Return the row of the table."""
    errors = [result["error"] for result in results if "error" in result]
    seconds = [value for result in results for value in result.get("seconds", ())]
    if not seconds:
        return f"| {name} | {errors[0][:120]} | | | |"
    peaks = [result["peak_bytes"] for result in results if "peak_bytes" in result]
    bounds = {result["stats"]["bound"] for result in results if "stats" in result}
    failed = f", {len(errors)} of {len(results)} runs failed" if errors else ""
    peak = f"{max(peaks) / 1e9:.2f} GB" if peaks else ""
    spread = f"{min(seconds):.4f} to {max(seconds):.4f} s"
    bound = ", ".join(sorted(map(str, bounds)))
    ahead = next((result["ahead"] for result in results if result.get("ahead")), None)
    if ahead:
        bound += f"; {ahead['seconds']:.2f} s ahead of every {ahead['steps']} steps"
    plan = next((result["plan"] for result in results if result.get("plan")), None)
    if plan:
        bound += f"; predicted {plan['step_s']:.4f} s, {plan['peak_bytes'] / 1e9:.2f} GB"
    return f"| {name} | {statistics.median(seconds):.4f} s{failed} | {spread} | {peak} | {bound} |"


def run_all(arguments: argparse.Namespace) -> None:
    """Run every row, print the table and write the results."""
    rivals = _rivals(arguments.rival)
    rows = [row for row in ROWS[arguments.work] if row not in RIVALS or row in rivals]
    if arguments.rows:
        rows = [row for row in rows if row in arguments.rows.split(";")]
    sizes = (
        [int(size) for size in arguments.sizes.split(",")]
        if arguments.work == "qwen" and not arguments.tiny
        else [0]
    )
    lines = ["| work | median step | range | peak | |", "|---|---|---|---|---|"]
    print(f"torch {torch.__version__}, {arguments.repeat} run(s) of {arguments.steps} steps a row")
    print("\n".join(lines), flush=True)
    everything: dict[str, Any] = {"torch": torch.__version__, "arguments": vars(arguments), "rows": {}}
    for pixels in sizes:
        for row in rows:
            name = f"{arguments.work}{f' {pixels}' if pixels else ''}, {row}"
            results = [start_row(arguments, row, pixels) for _ in range(arguments.repeat)]
            everything["rows"][name] = results
            lines.append(summarize(name, results))
            print(lines[-1], flush=True)
    if arguments.out:
        folder = Path(arguments.out)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"offload_{arguments.work}.md").write_text("\n".join(lines) + "\n")
        (folder / f"offload_{arguments.work}.json").write_text(json.dumps(everything, indent=1))


def _rivals(given: list[str]) -> dict[str, str]:
    folders = {}
    for text in given:
        name, _, folder = text.partition("=")
        if name not in RIVALS or not folder:
            raise SystemExit(f"--rival {text}: it is one of {', '.join(RIVALS)}, '=', and a folder")
        folders[name] = folder
    return folders


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("work", choices=list(ROWS))
    parser.add_argument("--rival", action="append", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--rows", default="", help="only these, separated by ';'")
    parser.add_argument("--sizes", default="1024,512", help="sides of the picture in pixels, for qwen")
    parser.add_argument(
        "--budget-gb", type=float, default=24.0, help="target memory of the row 'ferry, budget'"
    )
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument(
        "--warm-up",
        type=int,
        default=9,
        help="untimed steps; a budget is planned in six, and blocks recorded in three more",
    )
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--timeout-s", type=int, default=580)
    parser.add_argument("--out", default="")
    parser.add_argument("--row", default="", help=argparse.SUPPRESS)
    parser.add_argument("--pixels", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not arguments.row:
        run_all(arguments)
        return
    job = Job(
        work=arguments.work,
        row=arguments.row,
        device=arguments.device,
        pixels=arguments.pixels,
        is_tiny=arguments.tiny,
        rivals=_rivals(arguments.rival),
        budget_gb=arguments.budget_gb,
    )
    print(MARK + json.dumps(run_row(job, warm_up=arguments.warm_up, steps=arguments.steps)), flush=True)


if __name__ == "__main__":
    main()
