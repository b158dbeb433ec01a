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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from ..errors import RequestError
from ..log import get_logger
from .planner import GB, ResidencyPlan, correct, plan_residency
from .prediction import BucketProfile, OffloadProfile
from .step_timer import IdleTimer, StepTimer, watch
from .unobserved import run_unobserved

if TYPE_CHECKING:
    from .buckets import Bucket
    from .engine import Engine

_log = get_logger("offload")

_NUM_TIMED_STEPS = 3
# Of the memory that is free, the share that a plan may take: the allocator splits and rounds.
_USABLE_SHARE = 0.95
_NUM_LINK_COPIES = 3


@dataclass(frozen=True)
class OffloadBudget:
    """What an offloaded training may take.

    Attributes:
        vram_gb: Target memory for everything, in GB (10**9 bytes); ``auto``: what is free.
        ram_gb: Host memory for the masters, in GB; None: no limit.
        pin_gb: Host memory that may be pinned, in GB; None: no limit.
    """

    vram_gb: float | Literal["auto"] = "auto"
    ram_gb: float | None = None
    pin_gb: float | None = None

    def __post_init__(self) -> None:
        """Check the sizes.

        Raises:
            RequestError: If one is none.
        """
        if self.vram_gb != "auto":
            _check("vram_gb", self.vram_gb)
        for name in ("ram_gb", "pin_gb"):
            if getattr(self, name) is not None:
                _check(name, getattr(self, name))

    @property
    def ram_bytes(self) -> int | None:
        """Host memory for the masters."""
        return None if self.ram_gb is None else int(self.ram_gb * GB)

    @property
    def pin_bytes(self) -> int | None:
        """Host memory that may be pinned."""
        return None if self.pin_gb is None else int(self.pin_gb * GB)

    def vram_bytes(self, device: torch.device) -> int | None:
        """Return the target memory for everything, None for no limit (the CPU, without one)."""
        if self.vram_gb != "auto":
            return int(float(self.vram_gb) * GB)
        if device.type != "cuda":
            return None
        free, _ = torch.cuda.mem_get_info(device)
        allocated = torch.cuda.memory_allocated(device)
        return allocated + int(_USABLE_SHARE * (free + torch.cuda.memory_reserved(device) - allocated))

    def check_host(self, host_bytes: int) -> None:
        """Check that the masters fit.

        Raises:
            RequestError: If they do not.
        """
        if self.ram_bytes is not None and host_bytes > self.ram_bytes:
            raise RequestError(
                f"ram_gb={self.ram_gb} was asked for offloading",
                limit=f"The weights take {host_bytes / GB:.2f} GB of host memory",
                way_out="Raise the budget, or load the model in a smaller dtype (fp8)",
            )


def _check(name: str, value: object) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not (is_number and math.isfinite(value) and value >= 0):  # pyright: ignore
        raise RequestError(
            f"{name}={value!r}",
            limit="It is a size in GB (10**9 bytes), zero or more",
            way_out="Pass a number such as 12",
        )


class ResidencyTuner:
    """Finds and applies the plan for one engine.

    Args:
        engine: The engine, attached.
        budget: What the training may take.

    Attributes:
        plan: The plan in force, None before the second step.
        is_done: Whether it will not change any more.
        reserve: Returns how much of the budget others would like to have; they get it if a plan is possible
            without it.
        has_reserve: Whether they have it; False before there is a plan.
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
        self.reserve: Callable[[], int] = lambda: 0
        self.has_reserve = False

    def after_step(self) -> None:
        """Note that a forward and its backward are over.

        Raises:
            RequestError: If the budget is too small for this step.
        """
        if self.is_done:
            return
        self._num_steps += 1
        step_s, timer = self._stop()
        if self._num_steps == 2:
            self._profile = self._measure(timer, step_s)
            self._apply(self._profile)
        elif self._num_steps > 3:  # the third brings in what stays
            passes_s = sum(timer.compute_seconds(kind) for kind in ("forward", "backward"))
            self._timed.append((step_s, passes_s))
        if len(self._timed) == _NUM_TIMED_STEPS:
            assert self._profile is not None and self.plan is not None
            step_s, passes_s = (statistics.median(values) for values in zip(*self._timed, strict=True))
            corrected = correct(self._profile, self.plan, step_s=step_s, passes_compute_s=passes_s)
            self._apply(corrected)
            self.is_done = True
            _log.info("offload plan: %s", self.plan.describe())
            return
        self._start()

    def _start(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            if self._num_steps == 1:
                torch.cuda.reset_peak_memory_stats(self._device)
        watch(self._engine, StepTimer(self._device))
        self._started_s = time.perf_counter()

    def _stop(self) -> tuple[float, StepTimer]:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter() - self._started_s, watch(self._engine, IdleTimer())

    def _apply(self, profile: OffloadProfile) -> None:
        budget_bytes = self._budget.vram_bytes(self._device)
        if budget_bytes is None:
            budget_bytes = profile.other_bytes + 10 * profile.total_bytes
        reserve = self.reserve()
        # In the plan's own figures too: its peak is what will be seen.
        reserved = dataclasses.replace(profile, other_bytes=profile.other_bytes + reserve)
        try:
            self.plan = self._plan(reserved, budget_bytes)
            self.has_reserve = True
        except RequestError:
            if not reserve:
                raise
            self.plan = self._plan(profile, budget_bytes)
            self.has_reserve = False
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
            other_bytes=self._other_bytes(),
            overlaps=self._device.type == "cuda",
        )

    def _other_bytes(self) -> int:
        residency = self._engine.residency
        if self._device.type != "cuda":
            return residency.resident_set_bytes
        peak = torch.cuda.max_memory_allocated(self._device)
        return max(0, peak - residency.pool.allocated_bytes)

    def _measure_link(self) -> float:
        """Return bytes a second of copies of the largest bucket."""
        bucket = max(self._engine.store.buckets, key=lambda each: each.nbytes)
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
