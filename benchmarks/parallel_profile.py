"""Where the time of a parallel forward goes: kernels by kind, idle gaps, host time; variants side by side.

    torchrun --standalone --nproc-per-node=2 benchmarks/parallel_profile.py qwen-image --comfyui PATH \
        --size 2048x2048 --size 1024x1024

All ranks share the sequence by Ulysses, then by Ring. Times are medians of a few steps after warm-up, the
slowest rank's. ``groups`` is the number of head groups of the Ulysses exchange. Kinds of kernels are told by
their names. *exposed*: time in which only a collective runs; *idle*: in which nothing runs.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from comfyui_ferry.core.parallel import CompiledBlocks, ParallelDims, build_mesh, parallelize, with_cudnn
from comfyui_ferry.core.parallel.attention import ulysses
from comfyui_ferry.core.parallel.collectives import start_all_to_all
from comfyui_ferry.core.parallel.recorded_forward import RecordedForward
from comfyui_ferry.core.plans import find_plan
from parallel import join_group, model_parser, parse_size, plain_attention
from parallel_models import DENOISERS, Size
from torch.nn import functional as F

Call = Callable[[], Any]

KINDS = (
    ("collective", r"nccl"),
    ("attention", r"fmha|flash|attention|sdpa"),
    ("matrix product", r"gemm|nvjet|cutlass|xmma|cublas|splitk"),
    ("rope", r"rope"),
    ("compiled", r"^triton_"),
    ("norm", r"norm|Moments"),
    ("copy, cat", r"copy|cat|memcpy|memset|fill"),
    ("elementwise", r"elementwise|reduce|vectorized|unrolled"),
)


def main() -> None:
    """Be one rank."""
    parser = model_parser(__doc__, steps=3)
    parser.add_argument("--no-compile", action="store_true")
    bench = Bench(parser.parse_args())
    with torch.inference_mode():
        bench.run()
    sys.stdout.flush()
    os._exit(0)  # recorded graphs keep the communicator busy


class Bench:
    """One rank of the measurement."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.device, self.dtype = join_group(options)
        self.cuda = self.device.type == "cuda"
        self.started = time.perf_counter()
        self.sizes = [parse_size(text) for text in options.size or ["1024x1024"]]
        self.reference: dict[Size, torch.Tensor] = {}
        self.base: dict[Size, float] = {}

    def say(self, *words: object) -> None:
        """Print on the first rank."""
        if dist.get_rank() == 0:
            print(f"[{time.perf_counter() - self.started:5.1f} s]", *words, flush=True)

    def sync(self) -> None:
        """Wait for the GPU."""
        if self.cuda:
            torch.cuda.synchronize()

    def seconds(self, call: Call, count: int | None = None, warm_up: int = 2) -> float:
        """Return the median of ``call``, the slowest rank's."""
        for _ in range(warm_up):
            call()
        seen = []
        for _ in range(count or self.options.steps):
            self.sync()
            dist.barrier()
            start = time.perf_counter()
            call()
            self.sync()
            mine = torch.tensor([time.perf_counter() - start], device=self.device)
            dist.all_reduce(mine, op=dist.ReduceOp.MAX)
            seen.append(mine.item())
        return statistics.median(seen)

    def run(self) -> None:
        """Measure everything; what fails is said and left out."""
        world = dist.get_world_size()
        for size in self.sizes:
            self.attempt("exchange", lambda size=size: self.exchange(size))
        model = DENOISERS[self.options.model].build(self.device, self.dtype)
        self.say("model built,", torch.cuda.memory_allocated() / 2**30 if self.cuda else 0, "GiB")
        plan = find_plan(f"{type(model).__module__}.{type(model).__qualname__}")
        forward = getattr(model, "_forward", model)
        self.variant("one GPU", lambda inputs: forward(**inputs, transformer_options={}), profile=True)
        for method in ("ulysses", "ring"):
            layout = build_mesh(ParallelDims(**{method: world}))
            handle = parallelize(model, plan, group=layout.sequence_group)
            options = {
                "optimized_attention_override": with_cudnn(handle.attention_override, plain_attention())
            }

            def call(inputs: dict, handle: Any = handle, options: dict = options) -> Any:
                return handle.run(forward, **inputs, transformer_options=dict(options))

            if method == "ulysses":
                for groups in (1, 2, 3, 4):
                    with head_groups(groups):
                        self.variant(f"ulysses, groups={groups}", call, graph=groups < 3, profile=groups == 1)
            else:
                self.variant("ring", call, graph=True, profile=True)
            handle.remove()
        if not self.options.no_compile:
            layout = build_mesh(ParallelDims(ulysses=world))
            handle = parallelize(model, plan, group=layout.sequence_group)
            compiled = CompiledBlocks(model, plan)
            options = {
                "optimized_attention_override": compiled.attention_override(
                    with_cudnn(handle.attention_override, plain_attention())
                )
            }

            def compiled_call(inputs: dict) -> Any:
                return handle.run(forward, **inputs, transformer_options=dict(options))

            self.variant("ulysses, compiled", compiled_call, graph=True, profile=True)

    def attempt(self, what: str, call: Call) -> None:
        """Call; an error does not end the run (all ranks have the same)."""
        try:
            call()
        except Exception:  # noqa: BLE001 - one failed variant of many
            self.say(what, "FAILED:", traceback.format_exc()[-700:])

    def variant(
        self, name: str, forward: Callable[[dict], Any], *, graph: bool = False, profile: bool = False
    ) -> None:
        """Time one way to run the model at every size, and profile it."""
        for size in self.sizes:
            inputs = self.inputs(size)
            self.attempt(name, lambda inputs=inputs, size=size: self.timed(name, forward, inputs, size))
            if graph and self.cuda:
                recorded = RecordedForward(forward)
                self.attempt(
                    name,
                    functools.partial(self.timed, f"{name}, graph", recorded, inputs, size),
                )
                recorded.clear()
            if profile and self.cuda:
                self.attempt(name, lambda inputs=inputs: self.profile(lambda: forward(inputs)))
        if profile:
            self.attempt(name, lambda: self.host_time(name, forward))

    def inputs(self, size: Size) -> dict[str, Any]:
        """Return one call's arguments on the device."""

        def moved(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            wide = value.is_floating_point() and value.ndim > 1
            return value.to(self.device, self.dtype if wide else None)

        return {key: moved(value) for key, value in DENOISERS[self.options.model].inputs(size, 0).items()}

    def timed(self, name: str, forward: Callable[[dict], Any], inputs: dict, size: Size) -> None:
        """Print the time of one variant, and its difference from one GPU."""
        seconds = self.seconds(lambda: forward(inputs))
        output = forward(inputs).float()
        reference = self.reference.setdefault(size, output.clone())
        base = self.base.setdefault(size, seconds)
        difference = ((output - reference).abs().max() / reference.abs().max()).item()
        self.say(f"{size} {name}: {1e3 * seconds:.1f} ms, {base / seconds:.3f}x, difference {difference:.1e}")

    def host_time(self, name: str, forward: Callable[[dict], Any]) -> None:
        """Print how long the host issues one forward, at a size at which the GPU is never the slower."""
        inputs = self.inputs(Size(128, 128, self.sizes[0].frames and 1))
        forward(inputs)
        times = []
        for _ in range(5):
            self.sync()
            start = time.perf_counter()
            forward(inputs)
            times.append(time.perf_counter() - start)
        self.sync()
        self.say(f"host, {name}: {1e3 * min(times):.1f} ms a forward")

    def profile(self, call: Call) -> None:
        """Print the kernels of one forward by kind."""
        from torch.profiler import ProfilerActivity, profile

        self.sync()
        dist.barrier()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            call()
            self.sync()
        kernels = [
            (event.name, event.time_range.start, event.time_range.end)
            for event in profiler.events() or ()
            if event.device_type == torch.autograd.DeviceType.CUDA and not event.name.startswith("nccl:")
        ]
        report_kernels(kernels, self.say)

    def exchange(self, size: Size) -> None:
        """Time the parts of one block's exchange: Qwen-Image's heads at this size."""
        world, rank = dist.get_world_size(), dist.get_rank()
        heads, head_dim = 24, 128
        tokens = (size.width // 16) * (size.height // 16) + 256
        sizes = ulysses.split_sizes(tokens, world)
        local = sizes[rank]
        q, k, v = (
            torch.randn(1, heads, local, head_dim, device=self.device, dtype=self.dtype) for _ in range(3)
        )

        def timed(name: str, call: Call) -> None:
            def twenty() -> None:
                for _ in range(20):
                    call()

            self.say(f"{size} {name}: {1e6 * self.seconds(twenty, 3, 1) / 20:.0f} us")

        even = ulysses.head_groups(heads, world, 1)[0]
        row = 3 * head_dim * len(even[0])
        wide = tuple(tensor.view(torch.int64) for tensor in (q, k, v))
        timed("pack, 2 bytes", lambda: ulysses._packed((q, k, v), even))
        timed("pack, 8 bytes", lambda: ulysses._packed(wide, even))
        received = torch.empty(row * tokens, device=self.device, dtype=self.dtype)
        out, group = ulysses._packed((q, k, v), even), dist.group.WORLD
        assert group is not None
        timed(
            "qkv all-to-all",
            lambda: start_all_to_all(
                out,
                [row * local] * world,
                receive=received,
                receive_sizes=[row * n for n in sizes],
                group=group,
            ),
        )
        small = out[:world]
        timed(
            "all-to-all of 2 bytes",
            lambda: start_all_to_all(
                small, [1] * world, receive=received[:world], receive_sizes=[1] * world, group=group
            ),
        )

        def backend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
            return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

        def nothing(_: Any, __: Any, v: torch.Tensor, *___: Any, **____: Any) -> torch.Tensor:
            return v.transpose(1, 2).flatten(2)

        whole = torch.randn(1, tokens, 3, heads // world, head_dim, device=self.device, dtype=self.dtype)
        parts = whole.permute(2, 0, 3, 1, 4)
        timed("attention of this rank's heads", lambda: backend(*parts.unbind()))
        for groups in (2, 4):
            pieces = parts.chunk(groups, 2)
            timed(f"attention, groups={groups}", lambda pieces=pieces: [backend(*p.unbind()) for p in pieces])
        for groups in (1, 2, 3, 4):
            for label, function in (("exchange only", nothing), ("ulysses attention", backend)):
                call = ulysses.AttentionCall(function, q, k, v, None, False, {})
                timed(
                    f"{label}, groups={groups}",
                    lambda call=call, groups=groups: ulysses.ulysses_attention(
                        call, token_sizes=sizes, mask=None, group=group, num_groups=groups
                    ),
                )


@contextmanager
def head_groups(count: int) -> Iterator[None]:
    """Let every Ulysses exchange go by ``count`` groups of heads."""
    before = ulysses.GROUP_BYTES, ulysses.MAX_GROUPS
    ulysses.GROUP_BYTES, ulysses.MAX_GROUPS = 1, count
    try:
        yield
    finally:
        ulysses.GROUP_BYTES, ulysses.MAX_GROUPS = before


def report_kernels(kernels: list[tuple[str, float, float]], say: Callable[..., None]) -> None:
    """Print time and number of kernels by kind, the longest of the rest, and what was idle or exposed."""
    if not kernels:
        return
    totals: dict[str, list[float]] = {}
    others: dict[str, list[float]] = {}
    for name, start, end in kernels:
        kind = next((kind for kind, pattern in KINDS if re.search(pattern, name, re.IGNORECASE)), "other")
        totals.setdefault(kind, []).append(end - start)
        others.setdefault(f"{kind}: {name[:90]}", []).append(end - start)
    first, last = min(kernel[1] for kernel in kernels), max(kernel[2] for kernel in kernels)
    busy = covered(kernels)
    computing = covered([kernel for kernel in kernels if "nccl" not in kernel[0].lower()])
    span, exposed = last - first, busy - computing
    say(
        f"  kernels: {len(kernels)}, span {span / 1e3:.1f} ms, idle {(span - busy) / 1e3:.1f}, "
        f"exposed collectives {exposed / 1e3:.1f}"
    )
    for kind, times in sorted(totals.items(), key=lambda item: -sum(item[1])):
        say(f"    {kind}: {sum(times) / 1e3:.2f} ms in {len(times)}")
    for name, times in sorted(others.items(), key=lambda item: -sum(item[1]))[:22]:
        say(f"      {sum(times) / 1e3:.2f} ms in {len(times)}: {name}")


def covered(kernels: list[tuple[str, float, float]]) -> float:
    """Return the time in which at least one of the kernels runs."""
    total, until = 0.0, float("-inf")
    for _, start, end in sorted(kernels, key=lambda kernel: kernel[1]):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


if __name__ == "__main__":
    main()
