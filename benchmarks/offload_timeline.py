"""Where the time of one step of ``offload_training.py toy`` goes, beside a model of it in numbers.

    python benchmarks/offload_timeline.py "ferry, overlapped into the next step"
    python benchmarks/offload_timeline.py --model --update-ms 4.6       # no GPU needed
    python benchmarks/offload_timeline.py --device cpu --tiny           # tries the script

Prints, in milliseconds from the start of the step, when the host steps each layer's masters, when the
calling thread waits for one, and when forward, backward and ``step()`` are over; then how long the
optimizer's thread worked, waited for gradients and had nothing to do. The times are the host's.

The model knows only four times a layer: its copy to the target, its forward, its backward, and the
update of its masters. Gradients take as long as copies, in the other direction.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable
from typing import Any

import torch
from offload_rows import ROWS, Job, load_ferry

NUM_LAYERS = 10


def predict_step_ms(
    *, update_ms: float, copy_ms: float, forward_ms: float, backward_ms: float
) -> dict[str, float]:
    """Return the length of a steady step, by when the updates end: with ``step()``, or at their next use."""
    lengths = {}
    for finish in ("step", "next use"):
        updated = [0.0] * NUM_LAYERS
        begins = [0.0]
        for _ in range(6):
            computed = copied = begins[-1]
            for updated_at in updated:
                copied = max(copied, updated_at) + copy_ms
                computed = max(computed, copied) + forward_ms
            arrived, sent = [0.0] * NUM_LAYERS, computed
            copied = computed
            for layer in reversed(range(NUM_LAYERS)):
                if layer < NUM_LAYERS - 2:  # what the forward used last is still there
                    copied += copy_ms
                computed = max(computed, copied) + backward_ms
                sent = arrived[layer] = max(computed, sent) + copy_ms
            updated = _update(arrived, update_ms, in_order_sent=finish == "step")
            begins.append(max(updated) if finish == "step" else sent)
        lengths[finish] = begins[-1] - begins[-2]
    return lengths


def _update(arrived: list[float], update_ms: float, *, in_order_sent: bool) -> list[float]:
    updated, now, waiting = [0.0] * NUM_LAYERS, 0.0, set(range(NUM_LAYERS))
    while waiting:
        now = max(now, min(arrived[layer] for layer in waiting))
        ready = [layer for layer in waiting if arrived[layer] <= now]
        layer = max(ready) if in_order_sent else min(ready)
        waiting.remove(layer)
        now = updated[layer] = now + update_ms
    return updated


class Timeline:
    """Notes what two threads do, by wrapping the functions that do it."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, str, float, float]] = []

    def wrap(self, owner: Any, name: str, thread: str, label: Callable[..., str]) -> None:
        """Note every call of ``owner.name``."""
        inner = getattr(owner, name)

        @functools.wraps(inner)
        def timed(*args: Any, **kwargs: Any) -> Any:
            begin, text = time.perf_counter(), label(*args)
            try:
                return inner(*args, **kwargs)
            finally:
                self.spans.append((thread, text, begin, time.perf_counter()))

        setattr(owner, name, timed)

    def print(self, begin: float, end: float) -> None:
        """Print what overlaps the time between ``begin`` and ``end``, and the sums of the worker's."""
        spans = sorted((s for s in self.spans if s[3] > begin and s[2] < end), key=lambda span: span[2])
        sums = {"worker": 0.0, "arrival": 0.0}
        for thread, text, start, stop in spans:
            inside_s = min(stop, end) - max(start, begin)
            if thread in sums:
                sums[thread] += inside_s
            if inside_s > 2e-4 or thread == "mark":
                print(f"{(start - begin) * 1e3:8.2f} to {(stop - begin) * 1e3:8.2f} ms  {thread:8} {text}")
        length_s = end - begin
        updates_s, free_s = sums["worker"] - sums["arrival"], length_s - sums["worker"]
        print(
            f"step {length_s * 1e3:.1f} ms: the worker updates {updates_s * 1e3:.1f}, waits for gradients "
            f"{sums['arrival'] * 1e3:.1f}, has nothing to do {free_s * 1e3:.1f}"
        )


def watch(timeline: Timeline) -> None:
    """Time the worker's steps, its waits for gradients, and the calling thread's waits for steps."""
    load_ferry()
    from comfyui_ferry.core.offload import leases, master_steps, optimizer_calls, update_queue

    timeline.wrap(master_steps.MasterStep, "run", "worker", lambda step, _: f"updates {step.bucket.name}")
    timeline.wrap(leases.Arrival, "wait", "arrival", lambda _: "a gradient")
    timeline.wrap(leases.CudaArrival, "wait", "arrival", lambda _: "a gradient")
    timeline.wrap(
        update_queue.QueuedStep, "finish", "caller", lambda queued: f"waits for {queued.step.bucket.name}"
    )
    assert optimizer_calls


def main() -> None:
    """Print the timeline of one step."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("row", nargs="?", default="ferry, overlapped into the next step", choices=ROWS["toy"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--warm-up", type=int, default=6)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--model", action="store_true", help="print the model only")
    parser.add_argument("--update-ms", type=float, default=4.6)
    parser.add_argument("--copy-ms", type=float, default=1.25)
    parser.add_argument("--forward-ms", type=float, default=0.4)
    parser.add_argument("--backward-ms", type=float, default=0.8)
    arguments = parser.parse_args()
    times = {name: getattr(arguments, name) for name in ("update_ms", "copy_ms", "forward_ms", "backward_ms")}
    print("model:", {name: f"{length:.1f} ms" for name, length in predict_step_ms(**times).items()}, times)
    if arguments.model:
        return
    timeline = Timeline()
    watch(timeline)
    job = Job("toy", arguments.row, arguments.device, 0, arguments.tiny, {}, 0.0)
    torch.manual_seed(0)
    step = job.build()
    begins = []
    for _ in range(arguments.warm_up + arguments.steps):
        if arguments.device == "cuda":
            torch.cuda.synchronize()
        begins.append(time.perf_counter())
        timeline.spans.append(("mark", "step begins", begins[-1], begins[-1]))
        step()
    lengths = sorted(
        b - a for a, b in zip(begins[arguments.warm_up :], begins[arguments.warm_up + 1 :], strict=False)
    )
    print(f"{arguments.row}: median {lengths[len(lengths) // 2] * 1e3:.1f} ms, best {lengths[0] * 1e3:.1f}")
    timeline.print(begins[-2], begins[-1])


if __name__ == "__main__":
    main()
