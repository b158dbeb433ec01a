"""Measure a few steps, plan what stays on the target, and correct the plan by what the next steps took.

The first step teaches the order of copies, the second is measured, then the plan is applied; after
three more steps it is corrected once and stays.

What this module does not do: the arithmetic is in ``planner``.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol

import torch

from ..errors import RequestError
from ..log import get_logger
from .budget import OffloadBudget
from .planner import ResidencyPlan, correct, plan_residency
from .prediction import BucketProfile, OffloadProfile
from .step_timer import IdleTimer, StepTimer, watch
from .unobserved import run_unobserved

if TYPE_CHECKING:
    from .buckets import Bucket
    from .engine import Engine

_log = get_logger("offload")

_NUM_TIMED_STEPS = 3
_NUM_LINK_COPIES = 3
# Recordings that nobody has made yet may take more than was thought.
_UNSEEN_SHARE = 1.25


class Recordings(Protocol):
    """CUDA graphs that would like a part of the budget."""

    @property
    def needed_bytes(self) -> int:
        """What they will take, about."""
        ...

    @property
    def pool_bytes(self) -> int:
        """What they have; PyTorch's peak counts it only while it is recorded."""
        ...

    @property
    def num_recordings(self) -> int:
        """How many there are."""
        ...


class ResidencyTuner:
    """Finds and applies the plan for one engine.

    Args:
        engine: The engine, attached.
        budget: What the training may take.

    Attributes:
        plan: The plan in force, None before the second step.
        is_done: Whether it will not change any more.
        recordings: Get a part of the budget if a plan is possible besides; None: there are none.
        has_reserve: Whether they have it; False before there is a plan.
        later_bytes: Returns target memory that will be taken for good, and that no step has shown yet.
    """

    def __init__(self, engine: Engine, budget: OffloadBudget) -> None:
        self._engine = engine
        self._budget = budget
        self._device = engine.config.target_device
        self._profile: OffloadProfile | None = None
        self._num_steps = 0
        self._started_s = 0.0
        self._timed: list[tuple[float, float]] = []
        self.plan: ResidencyPlan | None = None
        self.is_done = False
        self._other_bytes = 0
        self._num_recordings = -1
        self.recordings: Recordings | None = None
        self.has_reserve = False
        self.later_bytes: Callable[[], int] = lambda: 0

    def after_step(self) -> None:
        """Note that a forward and its backward are over.

        Raises:
            RequestError: If the budget is too small for this step; the next one is then measured anew.
        """
        if self.is_done:
            return
        self._num_steps += 1
        step_s, timer = self._stop()
        try:
            self._use_step(timer, step_s)
        except BaseException:
            # Whoever goes on (a smaller step within the budget, a retry after measuring ran out of memory)
            # has the next step measured.
            self._num_steps = 1
            self._timed.clear()
            raise
        finally:
            if not self.is_done:
                self._start()

    def _use_step(self, timer: StepTimer, step_s: float) -> None:
        if self._num_steps == 2:
            self._profile = self._measure(timer, step_s)
            self._apply(self._profile)
        elif self._num_steps > 3:  # the third brings in what stays
            passes_s = sum(timer.compute_seconds(kind) for kind in ("forward", "backward"))
            self._timed.append((step_s, passes_s))
        if len(self._timed) == _NUM_TIMED_STEPS:
            self._correct()

    def _correct(self) -> None:
        assert self._profile is not None and self.plan is not None
        step_s, passes_s = (statistics.median(values) for values in zip(*self._timed, strict=True))
        profile = correct(self._profile, self.plan, step_s=step_s, passes_compute_s=passes_s)
        seen_bytes = self._seen_other_bytes()
        if seen_bytes is not None:
            # The steps that were seen may be of smaller samples than the one that was measured first.
            other_bytes = max(profile.other_bytes, seen_bytes + self.later_bytes())
            profile = dataclasses.replace(profile, other_bytes=other_bytes)
        self._apply(profile)
        self.is_done = True
        _log.info("offload plan: %s", self.plan.describe())

    def _seen_other_bytes(self) -> int | None:
        """Return what the last step took besides its weights; None: blocks were recorded in it."""
        if self._device.type != "cuda" or self._count_recordings() != self._num_recordings:
            return None
        assert self.plan is not None
        weights_bytes = self.plan.prediction.peak_bytes - self._other_bytes
        return max(0, torch.cuda.max_memory_allocated(self._device) - weights_bytes)

    def _count_recordings(self) -> int:
        return 0 if self.recordings is None else self.recordings.num_recordings

    def _start(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            if self._num_steps == 1 or len(self._timed) == _NUM_TIMED_STEPS - 1:
                torch.cuda.reset_peak_memory_stats(self._device)
        self._num_recordings = self._count_recordings()
        pool = self._engine.residency.pool
        is_measured = self._num_steps == 1
        slot_bytes = (lambda: pool.allocated_bytes) if is_measured else None
        watch(self._engine, StepTimer(self._device, slot_bytes=slot_bytes))
        self._started_s = time.perf_counter()

    def _stop(self) -> tuple[float, StepTimer]:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter() - self._started_s, watch(self._engine, IdleTimer())

    def _apply(self, profile: OffloadProfile) -> None:
        budget_bytes = self._budget.vram_bytes(self._device)
        if budget_bytes is None:
            budget_bytes = profile.other_bytes + 10 * profile.total_bytes
        reserve = 0
        if self.recordings is not None:
            pool_bytes = self.recordings.pool_bytes
            reserve = int(self.recordings.needed_bytes * (1 if pool_bytes else _UNSEEN_SHARE))
            reserve = max(reserve, pool_bytes)
        # In the plan's own figures too: its peak is what will be seen.
        reserved = dataclasses.replace(profile, other_bytes=profile.other_bytes + reserve)
        try:
            self.plan = self._plan(reserved, budget_bytes)
            self.has_reserve, self._other_bytes = True, reserved.other_bytes
        except RequestError:
            if not reserve:
                raise
            self.plan = self._plan(profile, budget_bytes)
            self.has_reserve, self._other_bytes = False, profile.other_bytes
        apply_plan(self._engine, self.plan)

    def _plan(self, profile: OffloadProfile, budget_bytes: int) -> ResidencyPlan:
        return plan_residency(
            profile,
            vram_budget_bytes=budget_bytes,
            ram_budget_bytes=self._budget.ram_bytes,
            pin_budget_bytes=self._budget.pin_bytes,
        )

    def _measure(self, timer: StepTimer, step_s: float) -> OffloadProfile:
        """Return the step's profile; a pass's time is shared out by the buckets' bytes."""
        used = list(timer.used.values())
        total_bytes = max(1, sum(bucket.nbytes for bucket in used))
        passes = {kind: timer.compute_seconds(kind) for kind in ("forward", "backward")}
        spans_s = timer.seconds("forward") + timer.seconds("backward")
        link = self._measure_link()
        return OffloadProfile(
            buckets=tuple(
                BucketProfile(
                    name=bucket.name,
                    nbytes=bucket.nbytes,
                    forward_s=passes["forward"] * bucket.nbytes / total_bytes,
                    backward_s=passes["backward"] * bucket.nbytes / total_bytes,
                    may_stay=not any(tensor.is_trainable for tensor in bucket.tensors),
                )
                for bucket in used
            ),
            link_bytes_per_s=link,
            pageable_bytes_per_s=link * self._engine.transfer.pageable_share,
            other_s=max(0.0, step_s - spans_s),
            other_bytes=self._measure_other_bytes(timer) + self.later_bytes(),
            overlaps=self._device.type == "cuda",
        )

    def _measure_other_bytes(self, timer: StepTimer) -> int:
        if self._device.type != "cuda":
            return self._engine.residency.resident_set_bytes
        timer.note_peak()
        return max(0, timer.other_bytes)

    def _measure_link(self) -> float:
        """Return bytes a second of copies of the largest bucket."""
        bucket = max(self._engine.store.buckets, key=lambda each: each.nbytes, default=None)
        if bucket is None:  # all of the model is trained on the target
            return math.inf
        return self._engine.transfer.measure_link(bucket.host, num_copies=_NUM_LINK_COPIES)


def apply_plan(engine: Engine, plan: ResidencyPlan) -> None:
    """Keep what the plan keeps, from the next use on; nothing may run meanwhile.

    Raises:
        RequestError: If it names buckets that the model does not have.
    """
    names = {bucket.name for bucket in engine.store.buckets}
    unknown = sorted(plan.resident - names)
    if unknown:
        raise RequestError(
            f"a plan that keeps {unknown[0]!r} on the device was asked",
            limit=f"The model has {len(names)} parts that move, and none of that name",
            way_out="Make the plan for this model, with the same split threshold",
        )
    kept = [bucket for bucket in engine.store.buckets if bucket.name in plan.resident]
    set_kept(engine, kept, cache_limit_bytes=plan.ring_bytes)


def set_kept(engine: Engine, kept: Iterable[Bucket], *, cache_limit_bytes: int) -> None:
    """Call ``Residency.set_kept`` between steps of a model in use."""
    with engine.lock:
        run_unobserved(engine.residency.set_kept, kept, cache_limit_bytes=cache_limit_bytes)


def lower_residency(engine: Engine, nbytes: int) -> int:
    """Give back kept target memory, last decided first, until ``nbytes`` are free; return how many are."""
    remaining = engine.residency.kept_buckets()
    freed = 0
    while remaining and freed < nbytes:
        bucket = remaining.pop()
        freed += bucket.nbytes if bucket.slot is not None else 0
    set_kept(engine, remaining, cache_limit_bytes=engine.residency.cache_limit_bytes)
    return freed
