"""Time of one call to the workers beyond its computation: `python benchmarks/worker_dispatch.py`.

CPU workers answer at once with a latent of the given size; the first rank returns it, as in sampling. Two
processes a rank share the machine's cores with this one, so a machine with few cores shows more. On a machine
that is busy with other work the processor time, of this process and of the first worker, says more.
"""

from __future__ import annotations

import argparse
import importlib
import os
import runpy
import statistics
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--calls", type=int, default=500)
    parser.add_argument("--kilobytes", type=int, nargs="+", default=[4, 512, 8192])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    runpy.run_path(str(ROOT / "core/workers/bootstrap.py"))["load_package"]("comfyui_ferry", str(ROOT))
    workers = importlib.import_module("comfyui_ferry.core.workers")
    for ranks in arguments.ranks:
        spec = workers.WorkerSpec(
            ("cpu",) * ranks,
            "ferry_support.worker_jobs",
            backend="gloo",
            num_threads=1,
            import_roots={"ferry_support": str(ROOT / "tests/support")},
        )
        with workers.WorkerPool.start(spec) as pool:
            for size in arguments.kilobytes:
                report(pool, ranks, size << 10, arguments.calls)


def report(pool: Any, ranks: int, num_bytes: int, calls: int) -> None:
    latent = torch.ones(num_bytes, dtype=torch.uint8)
    times, copies, copying_s = [], [], 0.0
    worker = pool._group.ranks[0].process.pid
    here, there = time.process_time(), processor_s(worker)
    for _ in range(calls):
        begin = time.perf_counter()
        latent.clone()
        copies.append(time.perf_counter() - begin)
        copying_s += copies[-1]
        begin = time.perf_counter()
        pool.call("first_returns", {"value": latent}, leases_results=True)
        times.append(time.perf_counter() - begin)
    here, there = time.process_time() - here - copying_s, processor_s(worker) - there
    median, best = (1e3 * value for value in (statistics.median(times), sorted(times)[len(times) // 20]))
    copy = 1e3 * statistics.median(copies)
    print(f"{ranks} ranks, {num_bytes >> 10:5d} KiB: median {median:.2f} ms, best 5 % {best:.2f} ms; "
          f"one copy takes {copy:.2f} ms; processor {1e3 * here / calls:.2f} ms here, "
          f"{1e3 * there / calls:.2f} ms in a worker")  # fmt: skip


def processor_s(pid: int) -> float:
    """Return the processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
