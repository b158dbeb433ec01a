"""Jobs for the tests of the worker pool; imported in worker processes only."""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import resource
import signal
import sys
import time
import types

import torch
import torch.distributed as dist
from comfyui_ferry.core.workers import borrows_arguments


def register(context, fail_on=None, way="refuse"):
    if context.rank == fail_on:
        if way == "refuse":
            raise ValueError("set-up went wrong on purpose")
        if way == "exit":
            print("these are my last words", flush=True)
            os._exit(7)
        commit_fault(way)
    return _Jobs(context).by_name()


class _Jobs:
    def __init__(self, context):
        self.context = context
        self.arena = {}
        self.kept = None

    def by_name(self):
        names = [name for name in dir(self) if name.startswith("job_")]
        return {name.removeprefix("job_"): getattr(self, name) for name in names} | {"borrow": borrow}

    def job_echo(self, value):
        return value

    @borrows_arguments  # as in sampling, where a worker copies them to its GPU
    def job_first_returns(self, value):
        return value if self.context.rank == 0 else None

    def job_describe(self):
        return {
            "rank": self.context.rank,
            "world_size": self.context.world_size,
            "device": self.context.device,
            "pid": os.getpid(),
            "visible": os.environ["CUDA_VISIBLE_DEVICES"],
            "allocator": os.environ.get("PYTORCH_CUDA_ALLOC_CONF"),
            "extra": os.environ.get("FERRY_EXTRA"),
            "threads": torch.get_num_threads(),
            "path": list(sys.path),
            "files": len(os.listdir("/proc/self/fd")),
            "interrupt_ignored": signal.getsignal(signal.SIGINT) is signal.SIG_IGN,
            "session": os.getsid(0) == os.getpid(),
        }

    def job_sum(self, value):
        value = value.to(self.context.device) + self.context.rank
        dist.all_reduce(value)
        return value

    def job_negate(self, value):
        value.neg_()  # in place: this rank's copy alone
        return value

    def job_sleep(self, seconds):
        time.sleep(seconds)
        return self.context.rank

    def job_raise_on(self, rank, how="error"):
        if self.context.rank == rank:
            if how == "exit":
                raise SystemExit(5)
            raise KeyError("a planted error")
        dist.barrier()

    def job_kill_on(self, rank):
        if self.context.rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    def job_crash_on(self, rank):
        if self.context.rank == rank:
            ctypes.string_at(0)
        dist.barrier()

    def job_stall_on(self, rank):
        if self.context.rank == rank:
            planted_stall()
        dist.barrier()

    def job_spin_natively(self):
        """Compute for hours in one call that keeps the interpreter's lock: a regular expression."""
        re.match(r"(a+)+$", "a" * 60 + "b")

    def job_meet(self, rank=-1, kind="", before=0, after=0, arena=None):
        """Meet the others in collectives, with a fault of one rank among them."""
        if arena is not None:
            self.arena |= self.context.open_arena(arena)
        value = torch.ones(1, device=self.context.device)
        for _ in range(before):
            dist.all_reduce(value)
        if self.context.rank == rank:
            commit_fault(kind)
        for _ in range(after):
            dist.all_reduce(value)
        with self.context.progress.waiting():
            return value.cpu()

    def job_loop_while_others_make_connections(self):
        """Rank 1 loops; the others keep a core busy inside torch.distributed, as NCCL does at first."""
        if self.context.rank == 1:
            print(f"a fault is planted at {time.monotonic():.3f}", flush=True)
            planted_loop()
        call = "hashlib.pbkdf2_hmac('sha256', b'', b'', 1 << 30)"
        code = compile(call, "torch/distributed/stand_in.py", "eval")
        types.FunctionType(code, {"hashlib": hashlib})()

    def job_compute(self, seconds, rank=0, parts=1):
        """One rank computes while the others wait for it, and marks each of several parts as done."""
        for _ in range(parts if self.context.rank == rank else 0):
            until = time.monotonic() + seconds / parts
            while time.monotonic() < until:
                torch.ones(64, 64) @ torch.ones(64, 64)
            self.context.progress.mark()
        dist.barrier()

    def job_unsendable(self):
        return {"outer": [object()]}

    def job_keep(self, value):
        self.kept = value

    def job_kept(self):
        return self.kept

    def job_open(self, arena):
        self.arena |= self.context.open_arena(arena)
        return sorted(self.arena)

    def job_read(self, name):
        return self.arena[name]

    def job_arena_bytes(self):
        """Bytes of the arena in this process: mapped, and copied out of the shared pages."""
        lines = open("/proc/self/smaps").read().splitlines()
        start = next(i for i, line in enumerate(lines) if "ferry-arena" in line)
        fields = dict(line.split(":") for line in lines[start + 1 : start + 20])
        return {name: 1024 * int(fields[name].split()[0]) for name in ("Rss", "Pss", "Anonymous")}


@borrows_arguments
def borrow(value):
    return value.sum(), value.data_ptr()


def commit_fault(kind):
    """Die, hang or raise, in the way that `kind` names."""
    print(f"a fault is planted at {time.monotonic():.3f}", flush=True)
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "stall":
        planted_stall()
    elif kind == "native":  # a native call that keeps the interpreter's lock, so that no thread runs
        ctypes.PyDLL(None).sleep(3600)
    elif kind == "raise":
        raise KeyError("a planted error")
    elif kind == "oom":
        planted_allocation()
    elif kind == "loop":
        planted_loop()
    elif kind == "gpu-oom":
        torch.empty(1 << 46, dtype=torch.uint8, device="cuda")


def planted_allocation():
    """Run out of memory for real: the address space may not grow any more."""
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), resource.RLIM_INFINITY))
    try:
        torch.empty(1 << 30)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)


def planted_loop():
    while True:
        pass


def planted_stall():
    time.sleep(3600)
