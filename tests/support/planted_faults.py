"""Faults of one worker of a real MODEL, at every phase of its life; planted before the workers are forked."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from comfyui_ferry.core.comfy_adapter import worker_start
from comfyui_ferry.core.log import RANK_VARIABLE
from comfyui_ferry.core.workers import Deadlines
from ferry_support.worker_jobs import commit_fault

PHASES = ("start", "load", "patch", "first", "mid", "unload")
# Calls of any block before "mid": tiny Wan has three blocks, so it is inside the second evaluation.
_BLOCKS_BEFORE = 4
_RANK = "1"


class FaultPlan:
    """Says which fault rank 1 commits next, and where; workers that run already heed it too.

    Args:
        file: Where it is written.
    """

    def __init__(self, file: Path) -> None:
        self._file = file

    def set(self, phase: str, kind: str) -> None:
        """Have rank 1 commit the fault when it gets there; ``slow``: take a second."""
        self._file.write_text(f"{phase} {kind}")

    def clear(self) -> None:
        """Have it commit none."""
        self._file.unlink(missing_ok=True)

    def commit(self, phase: str) -> None:
        """Commit the planned fault, if this is rank 1 at that phase."""
        if os.environ.get(RANK_VARIABLE) != _RANK or not self._file.exists():
            return
        planned, kind = self._file.read_text().split()
        if planned != phase:
            return
        if kind == "slow":
            time.sleep(1.0)
        else:
            commit_fault(kind)


def install(monkeypatch: Any, plan: FaultPlan, deadlines: Deadlines | None = None) -> None:
    """Put ``plan`` into the worker's jobs and the blocks of Wan, for workers that are forked from now on."""
    from comfy.ldm.wan.model import WanAttentionBlock
    from comfyui_ferry.core.comfy_adapter import jobs

    def before(owner: Any, name: str, phase: str, *, after: int = 0) -> None:
        original: Callable[..., Any] = getattr(owner, name)
        calls = []

        @functools.wraps(original)
        def run(*args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            if len(calls) > after:
                plan.commit(phase)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, run)

    for name in ("load", "patch", "unload"):
        before(jobs._Models, name, name)
    before(jobs, "register", "start")
    before(WanAttentionBlock, "forward", "mid", after=_BLOCKS_BEFORE)
    before(jobs._Models, "forward", "first")
    if deadlines is not None:
        spec = worker_start._spec
        monkeypatch.setattr(
            worker_start, "_spec", lambda devices: replace(spec(devices), deadlines=deadlines)
        )
