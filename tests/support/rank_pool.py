"""Rank processes that stay for many calls: forked once, so a case costs no start and no imports.

``run_ranks`` starts processes for one function. A pool takes functions by name instead, because its
processes were forked before the call.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from ferry_support.ranks import collect_messages, join_group, results_of


class RankPool:
    """Gloo ranks, started with the first call; a failure ends them, and the next call starts new ones.

    Args:
        world_size: Number of ranks.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def call(self, name: str, *args: Any, timeout_s: float = 60) -> list[Any]:
        """Return ``fn(*args)`` of every rank, in rank order.

        Args:
            name: ``"module:function"`` of a module that a rank can import.
            *args: Picklable values, given to every rank.
            timeout_s: For this call.

        Raises:
            RankError: With the traceback of the first rank that failed.
        """
        if not self._processes:
            self._start()
        request = pickle.dumps((name, args))
        for pipe in self._pipes:
            pipe.send_bytes(request)
        messages = collect_messages(self._pipes, timeout_s)
        if any(message[0] != "done" for message in messages):
            self.close()
        return results_of(messages)

    def close(self) -> None:
        """End the ranks; calling it again does nothing."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(timeout=5)
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _start(self) -> None:
        context = multiprocessing.get_context("fork")
        self._folder = tempfile.TemporaryDirectory()
        rendezvous = f"{self._folder.name}/rendezvous"
        pairs = [context.Pipe() for _ in range(self.world_size)]
        self._pipes = [ours for ours, _ in pairs]
        for rank, (_, theirs) in enumerate(pairs):
            args = (theirs, rank, self.world_size, rendezvous)
            self._processes.append(context.Process(target=_serve, args=args, daemon=True))
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # a forked child must not find a thread pool in use
        for process in self._processes:
            process.start()
        torch.set_num_threads(threads)
        for _, theirs in pairs:
            theirs.close()


def _serve(pipe: Connection, rank: int, world_size: int, rendezvous: str) -> None:
    """Body of one rank: answer calls until the pool ends this process."""
    torch.set_num_threads(1)
    join_group(rank, world_size, rendezvous, timeout_s=120)
    while True:
        try:
            name, args = pickle.loads(pipe.recv_bytes())
        except EOFError:  # the pool's process is gone
            os._exit(0)
        try:
            module, _, function = name.partition(":")
            result = getattr(importlib.import_module(module), function)(*args)
            dist.barrier()
            message = pickle.dumps(("done", result, time.monotonic()))
        except BaseException:
            message = pickle.dumps(("raised", traceback.format_exc(), time.monotonic()))
        pipe.send_bytes(message)
