"""Run a function on several ranks, each a real process with a process group of its own.

``run_ranks`` forks this process, so imports are warm and any function will do; gloo only, and CUDA
must not have been touched. ``run_named_ranks`` starts fresh interpreters, for NCCL.
"""

from __future__ import annotations

import datetime
import importlib
import multiprocessing
import multiprocessing.connection
import os
import pickle
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# What a rank says: "done", "raised", "died" or "late"; its result or traceback; when, on the clock that
# all processes of a machine share.
Message = tuple[str, Any, float]


class RankError(AssertionError):
    """A rank raised, died or did not end in time; the message holds its traceback."""


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 60) -> list[Any]:
    """Return ``fn(*args)`` of every rank, in rank order; each sees an initialised gloo group.

    Args:
        fn: Any function; it may be a closure.
        world_size: Number of ranks.
        *args: Given to every rank.
        timeout_s: For all of it.

    Raises:
        RankError: With the traceback of the first rank that failed.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(world_size)]
        processes = []
        for rank, (_, sender) in enumerate(pipes):
            target_args = (fn, args, rank, world_size, f"{folder}/rendezvous", sender, timeout_s)
            processes.append(context.Process(target=_forked_rank, args=target_args, daemon=True))
        for process in processes:
            process.start()
        for _, sender in pipes:
            sender.close()
        try:
            messages = collect_messages([receiver for receiver, _ in pipes], timeout_s)
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join(timeout=5)
            for receiver, _ in pipes:
                receiver.close()
    return results_of(messages)


def run_named_ranks(
    name: str, world_size: int, *args: Any, backend: str = "nccl", timeout_s: float = 180
) -> list[Any]:
    """Return ``fn(*args)`` of every rank, each a fresh interpreter; rank r uses GPU r under NCCL.

    Args:
        name: ``"module:function"`` of a module under ``ferry_support``.
        world_size: Number of ranks.
        *args: Picklable values, given to every rank.
        backend: ``"nccl"`` or ``"gloo"``.
        timeout_s: For all of it.

    Raises:
        RankError: With the traceback of the first rank that failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        request = {"name": name, "args": args, "world_size": world_size, "backend": backend}
        request |= {"rendezvous": f"{folder}/rendezvous", "timeout_s": timeout_s}
        Path(folder, "request").write_bytes(pickle.dumps(request))
        conftest = Path(__file__).resolve().parent.parent / "conftest.py"
        code = (
            "import importlib.util, sys; "
            f"spec = importlib.util.spec_from_file_location('ferry_conftest', {str(conftest)!r}); "
            "module = importlib.util.module_from_spec(spec); spec.loader.exec_module(module); "
            "from ferry_support.ranks import named_rank; named_rank(sys.argv[1], int(sys.argv[2]))"
        )
        logs = [Path(folder, f"log{rank}") for rank in range(world_size)]
        processes: list[subprocess.Popen] = []
        try:
            for rank, log in enumerate(logs):
                command = [sys.executable, "-c", code, folder, str(rank)]
                with log.open("wb") as output:
                    processes.append(subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT))
            _wait_for(processes, timeout_s)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        messages: list[Message] = []
        for rank, log in enumerate(logs):
            result = Path(folder, f"result{rank}")
            died = ("died", log.read_text(errors="replace")[-4000:], time.monotonic())
            messages.append(pickle.loads(result.read_bytes()) if result.exists() else died)
    return results_of(messages)


def named_rank(folder: str, rank: int) -> None:
    """Body of one process of ``run_named_ranks``."""
    request = pickle.loads(Path(folder, "request").read_bytes())
    module, _, function = request["name"].partition(":")
    if request["backend"] == "nccl":
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    message = _run_one(
        lambda *args: getattr(importlib.import_module(module), function)(*args),
        request["args"],
        rank,
        request["world_size"],
        request["rendezvous"],
        request["timeout_s"],
        backend=request["backend"],
    )
    partial = Path(folder, f"partial{rank}")
    partial.write_bytes(message)
    partial.rename(Path(folder, f"result{rank}"))


def _forked_rank(
    fn: Callable,
    args: tuple,
    rank: int,
    world_size: int,
    rendezvous: str,
    sender: Connection,
    timeout_s: float,
) -> None:
    torch.set_num_threads(1)
    sender.send_bytes(_run_one(fn, args, rank, world_size, rendezvous, timeout_s, backend="gloo"))
    sender.close()
    # Skip interpreter shutdown: this is a fork of a process that owns pytest's state.
    os._exit(0)


def _run_one(
    fn: Callable, args: tuple, rank: int, world_size: int, rendezvous: str, timeout_s: float, *, backend: str
) -> bytes:
    try:
        join_group(rank, world_size, rendezvous, timeout_s=timeout_s, backend=backend)
        result = fn(*args)
        dist.barrier()
        return pickle.dumps(("done", result, time.monotonic()))
    except BaseException:
        return pickle.dumps(("raised", traceback.format_exc(), time.monotonic()))


def join_group(
    rank: int, world_size: int, rendezvous: str, *, timeout_s: float, backend: str = "gloo"
) -> None:
    """Make this process a rank of a new default group.

    Args:
        rank: This rank.
        world_size: Number of ranks.
        rendezvous: Path of a file that does not exist yet, the same for all.
        timeout_s: For each collective.
        backend: ``"gloo"`` or ``"nccl"``.
    """
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        backend,
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=timeout_s),
    )


def collect_messages(receivers: list[Connection], timeout_s: float) -> list[Message]:
    """Read one message from each rank; the first failure ends the wait, since the others may hang."""
    deadline = time.monotonic() + timeout_s
    messages: list[Message] = [("late", f"no answer within {timeout_s} s", deadline)] * len(receivers)
    waiting = dict(enumerate(receivers))
    grace_ends = deadline
    while waiting and time.monotonic() < min(deadline, grace_ends):
        ready = multiprocessing.connection.wait(list(waiting.values()), timeout=0.2)
        for rank in [rank for rank, receiver in waiting.items() if receiver in ready]:
            try:
                messages[rank] = pickle.loads(waiting.pop(rank).recv_bytes())
            except EOFError:
                messages[rank] = ("died", "the process ended without an answer", time.monotonic())
            if messages[rank][0] != "done":
                grace_ends = min(grace_ends, time.monotonic() + 2)
    return messages


def _wait_for(processes: list[subprocess.Popen], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and any(process.poll() is None for process in processes):
        time.sleep(0.1)


def results_of(messages: list[Message]) -> list[Any]:
    """Return what the ranks returned, or raise the error of the one that is the cause."""
    order = {"raised": 0, "died": 1, "late": 2}
    failed = [(order[kind], at, rank) for rank, (kind, _, at) in enumerate(messages) if kind != "done"]
    if failed:
        # A rank that lost its peer raises too, after the one that is the cause.
        rank = min(failed)[2]
        kind, what, _ = messages[rank]
        raise RankError(f"rank {rank} of {len(messages)} {kind}:\n{what}")
    return [what for _, what, _ in messages]
