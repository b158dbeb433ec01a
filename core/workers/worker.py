"""A worker's main loop: receive a call, run the job, reply with its result or its traceback."""

from __future__ import annotations

import datetime
import importlib
import mmap
import os
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from ..log import get_logger
from .bootstrap import load_package
from .channel import Link, Message, Outgoing
from .progress import ProgressCounter
from .protocol import PayloadEncoder
from .shared_arena import open_arena
from .shared_memory import BufferLender

Job = Callable[..., Any]

_BORROWS = "_ferry_borrows_arguments"
# Fits a frame even if every character is escaped.
_MAX_TRACEBACK_CHARS = 8_000
_log = get_logger("workers")


@dataclass(frozen=True)
class WorkerContext:
    """What a worker is, given to ``register``; the default process group is ready for collectives.

    Attributes:
        rank: This process' rank.
        world_size: Number of ranks.
        device: ``cpu`` or ``cuda:0``, the only GPU that this process sees.
        progress: Where a long job marks each part that is done; a slow one is told from one that hangs by it.
    """

    rank: int
    world_size: int
    device: torch.device
    progress: ProgressCounter = field(default_factory=lambda: ProgressCounter(None, torch.device("cpu")))

    def open_arena(self, handle: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Return the tensors of the parent's ``SharedArena``, sharing its memory."""
        return open_arena(handle)


def borrows_arguments(job: Job) -> Job:
    """Mark a job that receives its tensors without a copy, as views of the message's buffer.

    They are read-only (writing ends the process) and valid until the job returns. Right for a job
    that moves them to its GPU first thing.
    """
    setattr(job, _BORROWS, True)
    return job


def run(connection: socket.socket, seen: mmap.mmap) -> None:
    """Serve the parent until it says stop; then, or once the parent is gone, the process ends.

    Args:
        connection: To the parent.
        seen: Memory that the parent sees, for the progress of jobs.
    """
    try:
        _serve(connection, seen)
    except (EOFError, ConnectionError):
        # The watch of `bootstrap` ends the process; an exit from here would race with its clean-up.
        threading.Event().wait()
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    # The parent wants its GPU memory back now; interpreter shutdown with CUDA takes a while.
    os._exit(0)


def _serve(connection: socket.socket, seen: mmap.mmap) -> None:
    link = Link(connection, BufferLender(), writable=False)
    jobs: dict[str, Job] = {}
    while (message := _next_message(link)).fields["kind"] != "stop":
        number, name = message.fields["call"], message.fields["job"]
        try:
            arguments = message.decode(copy=not getattr(jobs.get(name), _BORROWS, False))
            if message.fields["kind"] == "start":
                jobs |= _start(seen, **arguments)
                result: Any = sorted(jobs)
            else:
                result = jobs[name](**arguments)
            encoder = PayloadEncoder()
            content = encoder.encode(result, f"the result of job {name!r}")
            outgoing = Outgoing(encoder, [content], link.lender)
        except BaseException as error:  # noqa: BLE001 - the process boundary; all is reported
            described = _describe(error)
            _log.error("job %r failed: %s", name, described["summary"])
            link.send({"kind": "error", "call": number, **described})
            continue
        del arguments, result
        link.finish(message)
        link.send({"kind": "result", "call": number}, outgoing)


def _next_message(link: Link) -> Message:
    while (message := link.receive()) is None:
        link.wait()
    return message


def _describe(error: BaseException) -> dict[str, str]:
    text = traceback.format_exc()
    summary = traceback.format_exception_only(error)[-1].strip()
    return {"summary": summary[:1000], "traceback": text[-_MAX_TRACEBACK_CHARS:]}


def _start(
    seen: mmap.mmap,
    *,
    rank: int,
    world_size: int,
    on_gpu: bool,
    backend: str,
    rendezvous: str | None,
    store: str | None,
    collective_s: float,
    num_threads: int,
    import_paths: list[str],
    import_roots: dict[str, str],
    setup_module: str,
    setup_args: dict[str, Any],
) -> dict[str, Job]:
    torch.set_num_threads(num_threads)
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    sys.path[:0] = import_paths
    for alias, folder in import_roots.items():
        load_package(alias, folder)
    timeout = datetime.timedelta(seconds=collective_s)
    if store is None:
        meeting: dict[str, Any] = {"init_method": f"file://{rendezvous}"}
    else:
        host, _, port = store.rpartition(":")
        meeting = {"store": dist.TCPStore(host, int(port), world_size, is_master=False, timeout=timeout)}
    dist.init_process_group(
        backend,
        **meeting,
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        device_id=device if backend == "nccl" else None,
    )
    module = importlib.import_module(setup_module)
    context = WorkerContext(rank, world_size, device, ProgressCounter(seen, device))
    return module.register(context, **setup_args)
