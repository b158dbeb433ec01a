"""Expected speed-ups of parallel denoisers on 2, 4 and 8 GPUs: computed, nothing is measured; needs no GPU.

    python benchmarks/expected.py --comfyui PATH qwen-image --size 2048x2048=0.817 --size 1024x1024=0.156

Operations, attention calls and bytes of one evaluation are counted by ComfyUI's class on the meta device
(``core/parallel/dry_run.py``); the planner's model (``core/parallel/cost_model.py``) makes seconds of them.
What it is told: the seconds of one evaluation on one GPU with the kernels that workers use (after ``=``; a
size without them is computed at the speed, in FLOP/s, of the first that has them), the rate of the links, and
the time that a collective takes at least. Launches are not counted: workers replay CUDA graphs.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import torch
from comfyui_ferry.core.parallel import DenoiserWork, Machine, ParallelDims, predict
from parallel import parse_size, work_of
from parallel_models import DENOISERS

_GIB = 2**30
MESHES = (
    ParallelDims(ulysses=2), ParallelDims(ring=2), ParallelDims(tp=2), ParallelDims(cfg=2),
    ParallelDims(ulysses=4), ParallelDims(ring=4), ParallelDims(ring=2, ulysses=2), ParallelDims(tp=4),
    ParallelDims(cfg=2, ulysses=2), ParallelDims(cfg=2, tp=2),
    ParallelDims(ulysses=8), ParallelDims(ring=8), ParallelDims(ring=2, ulysses=4), ParallelDims(tp=8),
    ParallelDims(cfg=2, ulysses=4), ParallelDims(cfg=2, ring=2, ulysses=2),
    ParallelDims(cfg=2, tp=2, ulysses=2),
)  # fmt: skip


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", choices=list(DENOISERS))
    parser.add_argument("--comfyui", type=Path, required=True)
    parser.add_argument("--size", action="append", required=True, help="WIDTHxHEIGHT[xFRAMES][=SECONDS]")
    parser.add_argument("--tflops", type=float, help="speed of one GPU, where no size has seconds")
    parser.add_argument("--link", type=float, default=330.0, help="GB/s of one GPU to others, one direction")
    parser.add_argument("--collective", type=float, default=50.0, help="least microseconds of a collective")
    options = parser.parse_args()
    sys.argv = sys.argv[:1]
    sys.path.insert(0, str(options.comfyui.resolve()))
    from comfy.cli_args import args

    args.cpu = True
    speed = None if options.tflops is None else options.tflops * 1e12
    columns: list[tuple[str, DenoiserWork, Machine]] = []
    for text in options.size:
        name, _, seconds = text.partition("=")
        size = parse_size(name)
        work = work_of(DENOISERS[options.model], size, torch.bfloat16)
        flops = work.linear_flops + sum(call.flops for call in work.attention)
        if seconds:
            speed = flops / float(seconds)
        if speed is None:
            parser.error(f"{size} has no seconds, and --tflops is not given")
        link, collective_s = options.link * 1e9, options.collective * 1e-6
        machine = Machine(1, 2**50, speed, speed, link, collective_s, dispatch_s=0.0)
        columns.append((str(size), work, machine))
        print(f"{size}: {flops / 1e12:.0f} TFLOP an evaluation, at {speed / 1e12:.0f} TFLOP/s")
    print(f"\n{table(columns)}")


def table(columns: list[tuple[str, DenoiserWork, Machine]]) -> str:
    """Return the expected steps as markdown: of one evaluation, or of two where CFG is shared.

    Args:
        columns: A name, one evaluation, and one GPU of the machine, for each size.
    """
    head = ["GPUs", "mesh", "weights of each"]
    for name, *_ in columns:
        head += [name, "speed-up", "waiting"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for dims in (ParallelDims(), *MESHES):
        work = columns[0][1]
        weights = work.weight_bytes - work.cut_weight_bytes + work.cut_weight_bytes / dims.tp
        axes = [(name, degree) for name, degree in dims.degrees.items() if degree > 1]
        mesh = " x ".join(f"{name} {degree}" for name, degree in axes)
        cells = [str(dims.world_size), mesh, f"{weights / _GIB:.1f} GiB"]
        for _, work, machine in columns:
            asked = replace(work, conditionings=dims.cfg)
            one, many = predict(asked, machine, ParallelDims()), predict(asked, machine, dims)
            cells += [
                f"{many.step_s:.3f} s",
                f"{one.step_s / many.step_s:.2f}",
                f"{100 * many.exchange_s / many.step_s:.0f} %",
            ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
