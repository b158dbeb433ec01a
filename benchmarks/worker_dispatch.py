"""Time of one call to the workers beyond its computation: `python benchmarks/worker_dispatch.py`.

CPU workers answer at once with a latent of the given size; the first rank returns it, as in sampling. Two
processes a rank share the machine's cores with this one, so a machine with few cores shows more.
"""

from __future__ import annotations

import argparse
import importlib
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
    times, copies = [], []
    for _ in range(calls):
        begin = time.perf_counter()
        latent.clone()
        copies.append(time.perf_counter() - begin)
        begin = time.perf_counter()
        pool.call("first_returns", {"value": latent})
        times.append(time.perf_counter() - begin)
    median, best = (1e3 * value for value in (statistics.median(times), sorted(times)[len(times) // 20]))
    copy = 1e3 * statistics.median(copies)
    print(f"{ranks} ranks, {num_bytes >> 10:5d} KiB: median {median:.2f} ms, best 5 % {best:.2f} ms; "
          f"one copy takes {copy:.2f} ms")  # fmt: skip


if __name__ == "__main__":
    main()
