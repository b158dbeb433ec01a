"""Seconds a step and peak GPU memory of a model whose weights stream within a budget, beside its rivals.

    COMFYUI_PATH=... python benchmarks/streaming.py --model qwen
    COMFYUI_PATH=... python benchmarks/streaming.py --model flux --ways resident ferry --budgets 4 8
    COMFYUI_PATH=... python benchmarks/streaming.py --tiny            # tries the script on the CPU

One step is one call of the diffusion model at 1024 x 1024, batch 1, bf16, random weights, as the sampler
calls it; nothing waits for the GPU between steps. A way of offloading runs in a process of its own, all
its budgets one after the other (dynamic VRAM: a process for each). The limit is max(compute, bytes /
link): compute is the resident model's step, bytes are what does not fit the budget, and the link is
measured by pinned copies of 256 MiB. Rivals get the same cap: ComfyUI's low-VRAM loading is told to load
that many bytes; dynamic VRAM finds the rest of the card occupied by another process, but for 3 GiB of
activations; diffusers' group offloading with streams has one block a group, whatever the budget.

Our own figure is of a whole sampling, with the time to compute its modulation ahead in it; so it can be
below the limit, which counts the modulation's bytes in every step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from streaming_models import CONFIGS, GIB, Work, set_up
from streaming_rows import WAYS

_OURS = ("ferry", "ferry without modulation cache")


def run_way(way: str, work: Work) -> None:
    """Measure one way in this process and print its results for the parent."""
    set_up(way, is_tiny=work.is_tiny)
    with torch.inference_mode():
        for result in WAYS[way](work):
            print("RESULT " + json.dumps(result), flush=True)


def in_subprocess(way: str, arguments: list[str], *, timeout_s: float) -> Iterator[dict[str, Any]]:
    """Yield the results of one way, and why it ended early if it did."""
    command = [sys.executable, __file__, "--way", way, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
        output, error, code = done.stdout, done.stderr, done.returncode
    except subprocess.TimeoutExpired as expired:
        output, error, code = str(expired.stdout or b"", "utf-8"), "out of time", 1
    for line in output.splitlines():
        if line.startswith("RESULT "):
            yield json.loads(line.removeprefix("RESULT "))
    if code:
        reason = (error.strip().splitlines() or [f"exit {code}"])[-1]
        yield {"error": reason[:160]}


def show(way: str, result: dict[str, Any], limits: dict[int, float]) -> None:
    """Print one row of the table."""
    if "error" in result:
        print(f"| {way} | | {result['error']} | | | | |", flush=True)
        return
    budget = result["budget"]
    limit = limits.get(budget)
    cells = [
        way,
        f"{budget / GIB:.3g}" if budget else "any",
        f"{result['seconds']:.4f}",
        f"{result['low']:.4f} to {result['high']:.4f}, {result['steps']} steps",
        f"{result['seconds'] / limit:.3f}" if limit else "",
        f"{result['peak'] / GIB:.2f}" if "peak" in result else "",
        f"{result['moved_a_step'] / 1e9:.2f}" if "moved_a_step" in result else "",
    ]
    print("| " + " | ".join(cells) + " |", flush=True)
    for name, spans in (("steps", result["spans"]), ("launched in", result["launches"])):
        rest = spans[1:] or spans
        print(f"# {name}: first {spans[0]:.4f} s, then {min(rest):.4f} to {max(rest):.4f}", end=", ")
        print(f"median {statistics.median(rest):.4f}", flush=True)
    if "stall" in result:
        print(f"# waits {result['stall']:.1%}, blocks {result['blocks']}", flush=True)


def main() -> None:
    """Run all ways and print a table, or one way (``--way``)."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=sorted(CONFIGS), default="qwen")
    parser.add_argument("--budgets", type=float, nargs="+", default=[4, 8, 16, 24], help="GB of 2**30 bytes")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--steps", type=int, default=20, help="of a sampling of ours")
    parser.add_argument("--rival-steps", type=int, default=4, help="of the others, all alike")
    parser.add_argument("--timeout", type=float, default=460, help="seconds that one way may take")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--way", choices=list(WAYS))
    chosen = parser.parse_args()
    budgets = [0.0006, 0.00065] if chosen.tiny and not chosen.way else chosen.budgets
    if chosen.way:
        in_bytes = tuple(int(budget * GIB) for budget in budgets)
        run_way(chosen.way, Work(chosen.model, in_bytes, chosen.steps, chosen.tiny))
        return
    print(f"# {chosen.model}, torch {torch.__version__}")
    print("| way | GB | s/step | range | x of limit | peak GiB | GB moved a step |")
    print("|---|---|---|---|---|---|---|", flush=True)
    limits: dict[int, float] = {}
    for way in chosen.ways:
        steps = chosen.steps if way in _OURS else chosen.rival_steps
        common = ["--model", chosen.model, "--steps", str(steps), *(["--tiny"] if chosen.tiny else [])]
        parts = [[budget] for budget in budgets] if way == "comfyui dynamic" else [budgets]
        begin = time.monotonic()
        for part in parts:
            arguments = [*common, "--budgets", *map(str, part)]
            for result in in_subprocess(way, arguments, timeout_s=chosen.timeout):
                if "link" in result:
                    limits |= _limits(result, budgets)
                show(way, result, limits)
        print(f"# {way}: {time.monotonic() - begin:.0f} s in all", flush=True)


def _limits(resident: dict[str, Any], budgets: list[float]) -> dict[int, float]:
    """Print the limit of each budget and return them."""
    link, compute = resident["link"], resident["seconds"]
    weight_bytes = resident["weight_bytes"]
    print(f"# link {link / 1e9:.1f} GB/s, compute {compute:.4f} s, weights {weight_bytes / 1e9:.2f} GB")
    found = {}
    for budget in budgets:
        moved = max(0.0, weight_bytes - budget * GIB)
        found[int(budget * GIB)] = limit = max(compute, moved / link)
        print(f"| limit | {budget:g} | {limit:.4f} | | 1 | | {moved / 1e9:.2f} |", flush=True)
    return found


if __name__ == "__main__":
    main()
