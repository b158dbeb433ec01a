"""Which buckets stay on the target, and what a step will then cost: arithmetic on a measured profile.

``plan_residency`` tries what the budgets allow, asks ``prediction`` what each would cost, and takes the
quickest, and of equally quick ones the smallest.

What this module does not do: it measures nothing and moves nothing; see ``tuner``.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from ..errors import RequestError
from .prediction import OffloadProfile, Prediction, predict, slot_bytes

GB = 10**9
# Rooms for streaming that are tried, in multiples of the largest streamed bucket.
_RING_DEPTHS = (1, 2, 3, 4, 6, 8)
# Numbers of resident blocks that are tried; models split into leaves have thousands of them.
_MAX_COUNTS = 64
# Less than this share of a step is no gain worth memory.
_GAIN = 0.005
# Buckets below this share of the largest are not called blocks.
_BLOCK_SHARE = 0.25


@dataclass(frozen=True)
class ResidencyPlan:
    """What to keep, and what is expected of it.

    Attributes:
        resident: Names of the buckets that stay on the target.
        ring_bytes: Room for streaming: the bucket in use and those on their way.
        pinned_bytes: Host memory to pin; what is streamed has it first.
        prediction: The cost of a step.
        num_blocks: Buckets of about the largest one's size.
        num_resident_blocks: How many of them stay.
        streamed_bytes: Bytes of the buckets that do not stay.
        host_bytes: Bytes of all masters.
    """

    resident: frozenset[str]
    ring_bytes: int
    pinned_bytes: int
    prediction: Prediction
    num_blocks: int
    num_resident_blocks: int
    streamed_bytes: int
    host_bytes: int

    def describe(self) -> str:
        """Return one line for people."""
        predicted = self.prediction
        return (
            f"keeps {self.num_resident_blocks} of {self.num_blocks} blocks, streams "
            f"{self.streamed_bytes / GB:.1f} GB through {self.ring_bytes / GB:.1f} GB, "
            f"{predicted.peak_bytes / GB:.1f} GB on the device, {self.host_bytes / GB:.1f} GB on the host "
            f"({self.pinned_bytes / GB:.1f} pinned), about {predicted.step_s:.2f} s a step, "
            f"{predicted.bound}-bound"
        )


def plan_residency(
    profile: OffloadProfile,
    *,
    vram_budget_bytes: int,
    ram_budget_bytes: int | None = None,
    pin_budget_bytes: int | None = None,
) -> ResidencyPlan:
    """Return the quickest plan within the budgets, the smallest of those that are equally quick.

    Args:
        profile: The measured step.
        vram_budget_bytes: Target memory for everything, the rest of the step included.
        ram_budget_bytes: Host memory for the masters; None: no limit.
        pin_budget_bytes: Host memory that may be pinned; None: no limit.

    Raises:
        RequestError: If not even the smallest plan fits; it says what that needs.
    """
    if ram_budget_bytes is not None and profile.total_bytes > ram_budget_bytes:
        raise RequestError(
            f"a budget of {ram_budget_bytes / GB:.2f} GB of host memory was asked",
            limit=f"The weights that are offloaded take {profile.total_bytes / GB:.2f} GB there",
            way_out="Raise the budget, or load the model in a smaller dtype (fp8)",
        )
    largest = max((bucket.nbytes for bucket in profile.buckets), default=0)
    floor = predict(profile, (), ring_bytes=largest).peak_bytes
    if floor > vram_budget_bytes:
        raise RequestError(
            f"a budget of {vram_budget_bytes / GB:.2f} GB of device memory was asked",
            limit=f"With everything streamed this step needs {floor / GB:.2f} GB, "
            f"{profile.other_bytes / GB:.2f} GB of it for other things than offloaded weights",
            way_out="Raise the budget, move smaller modules at a time, or lower resolution or batch size",
        )
    room = vram_budget_bytes - profile.other_bytes
    sizes = [bucket.nbytes for bucket in profile.buckets]
    rooms = [(depth, room - slot_bytes(sizes, ring_bytes=depth * largest)) for depth in _RING_DEPTHS]
    best: ResidencyPlan | None = None
    for depth, chosen in itertools.chain.from_iterable(
        ((depth, names) for names in _candidates(profile, left)) for depth, left in rooms
    ):
        plan = _make_plan(profile, chosen, ring_bytes=depth * largest, pin_budget_bytes=pin_budget_bytes)
        if plan.prediction.peak_bytes <= vram_budget_bytes and _is_better(plan, best):
            best = plan
    assert best is not None  # the floor fits
    return best


def correct(
    profile: OffloadProfile, plan: ResidencyPlan, *, step_s: float, passes_compute_s: float
) -> OffloadProfile:
    """Return the profile under which ``plan`` takes what was measured.

    Args:
        profile: What was assumed.
        plan: What ran.
        step_s: Seconds a step took.
        passes_compute_s: Seconds that forward and backward took without waiting for copies.
    """
    assumed_s = sum(bucket.forward_s + bucket.backward_s for bucket in profile.buckets)
    factor = passes_compute_s / assumed_s if assumed_s else 1.0
    buckets = tuple(
        dataclasses.replace(b, forward_s=b.forward_s * factor, backward_s=b.backward_s * factor)
        for b in profile.buckets
    )
    profile = dataclasses.replace(profile, buckets=buckets)
    low, high = 0.25, 4.0  # how much slower the link is than assumed
    for _ in range(40):
        middle = (low * high) ** 0.5
        if _predicted(_with_slower_link(profile, middle), plan) < step_s:
            low = middle
        else:
            high = middle
    # A link that nothing waited for cannot be judged: it stays as it was.
    waits = _predicted(profile, plan) > _predicted(_with_slower_link(profile, 0.25), plan) * (1 + _GAIN)
    scaled = _with_slower_link(profile, (low * high) ** 0.5) if waits or low > 1 else profile
    rest_s = step_s - _predicted(scaled, plan)
    return dataclasses.replace(scaled, other_s=max(0.0, scaled.other_s + rest_s))


def _predicted(profile: OffloadProfile, plan: ResidencyPlan) -> float:
    return predict(profile, plan.resident, ring_bytes=plan.ring_bytes, pinned_bytes=plan.pinned_bytes).step_s


def _with_slower_link(profile: OffloadProfile, factor: float) -> OffloadProfile:
    return dataclasses.replace(
        profile,
        link_bytes_per_s=profile.link_bytes_per_s / factor,
        pageable_bytes_per_s=profile.pageable_bytes_per_s / factor,
    )


def _is_better(plan: ResidencyPlan, best: ResidencyPlan | None) -> bool:
    if best is None:
        return True
    mine, its = plan.prediction, best.prediction
    if abs(mine.step_s - its.step_s) > _GAIN * its.step_s:
        return mine.step_s < its.step_s
    return mine.peak_bytes < its.peak_bytes


def _candidates(profile: OffloadProfile, room_bytes: int) -> Iterable[frozenset[str]]:
    """Yield sets of residents: small buckets first, then ever more blocks, spread evenly or at an end."""
    if room_bytes < 0:
        return
    largest = max((bucket.nbytes for bucket in profile.buckets), default=0)
    movable = [bucket for bucket in profile.buckets if bucket.may_stay]
    small = [bucket for bucket in movable if bucket.nbytes < _BLOCK_SHARE * largest]
    blocks = [bucket for bucket in movable if bucket.nbytes >= _BLOCK_SHARE * largest]
    yield frozenset()
    if sum(bucket.nbytes for bucket in small) > room_bytes:
        return
    room_bytes -= sum(bucket.nbytes for bucket in small)
    counts = [
        count
        for count in range(len(blocks) + 1)
        if sum(blocks[index].nbytes for index in _spread(len(blocks), count)) <= room_bytes
    ]
    for place in _spread(len(counts), min(len(counts), _MAX_COUNTS)):
        count = counts[place]
        for chosen in {_spread(len(blocks), count), tuple(range(count)), tuple(range(-count, 0))}:
            names = [blocks[index] for index in chosen]
            if sum(bucket.nbytes for bucket in names) <= room_bytes:
                yield frozenset(bucket.name for bucket in (*small, *names))


def _spread(total: int, count: int) -> tuple[int, ...]:
    """Return ``count`` of ``total`` indices, evenly spaced, with both ends where there are two or more."""
    if count <= 1:
        return (total - 1,) * count
    return tuple(round(index * (total - 1) / (count - 1)) for index in range(count))


def _make_plan(
    profile: OffloadProfile, resident: frozenset[str], *, ring_bytes: int, pin_budget_bytes: int | None
) -> ResidencyPlan:
    streamed = sum(bucket.nbytes for bucket in profile.buckets if bucket.name not in resident)
    pinned = streamed if pin_budget_bytes is None else min(streamed, pin_budget_bytes)
    largest = max((bucket.nbytes for bucket in profile.buckets), default=0)
    blocks = [bucket for bucket in profile.buckets if bucket.nbytes >= _BLOCK_SHARE * largest]
    return ResidencyPlan(
        resident=resident,
        ring_bytes=ring_bytes,
        pinned_bytes=pinned,
        prediction=predict(profile, resident, ring_bytes=ring_bytes, pinned_bytes=pinned),
        num_blocks=len(blocks),
        num_resident_blocks=sum(bucket.name in resident for bucket in blocks),
        streamed_bytes=streamed,
        host_bytes=profile.total_bytes,
    )
