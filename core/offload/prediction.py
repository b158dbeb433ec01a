"""What a step costs with given residents: a walk through its passes, on a measured profile.

A step streams what does not stay twice: in the forward, and in the backward, where a recompute and the
gradients share one copy. What the forward used last is still there when the backward begins. Copies run
one after the other, ahead of the computation as far as the room for streaming allows.

What this module does not do: it chooses nothing; see ``planner``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .slots import largest_reused


@dataclass(frozen=True)
class BucketProfile:
    """One bucket.

    Attributes:
        name: Path of the module.
        nbytes: Size.
        forward_s: What its forward computes, in seconds, without waiting for copies.
        backward_s: The same for recompute and backward.
        may_stay: Whether it could be resident (nothing in it is trained on the host).
    """

    name: str
    nbytes: int
    forward_s: float
    backward_s: float
    may_stay: bool = True


@dataclass(frozen=True)
class OffloadProfile:
    """One step, measured.

    Attributes:
        buckets: In the order of the forward.
        link_bytes_per_s: Host to target, from pinned memory.
        pageable_bytes_per_s: The same from memory that is not pinned.
        other_s: What a step does besides forward and backward.
        other_bytes: Target memory at its peak besides streamed and kept weights.
        overlaps: Whether copies run beside the computation (not on the CPU).
    """

    buckets: tuple[BucketProfile, ...]
    link_bytes_per_s: float
    pageable_bytes_per_s: float
    other_s: float
    other_bytes: int
    overlaps: bool = True

    @property
    def total_bytes(self) -> int:
        """Bytes of all buckets."""
        return sum(bucket.nbytes for bucket in self.buckets)


@dataclass(frozen=True)
class Prediction:
    """What a step costs.

    Attributes:
        step_s: Seconds a step.
        link_s: Seconds in which the link is busy.
        compute_s: Seconds in which the target computes.
        moved_bytes: Bytes copied to the target.
        peak_bytes: Target memory at its peak.
    """

    step_s: float
    link_s: float
    compute_s: float
    moved_bytes: int
    peak_bytes: int

    @property
    def bound(self) -> str:
        """What the step's time is made of: ``link`` or ``compute``."""
        return "link" if self.link_s > self.compute_s else "compute"


def predict(
    profile: OffloadProfile, resident: Iterable[str], *, ring_bytes: int, pinned_bytes: int | None = None
) -> Prediction:
    """Return what a step costs with these residents.

    Args:
        profile: The step.
        resident: Names of the buckets that stay.
        ring_bytes: Room for streaming.
        pinned_bytes: Host memory that is pinned; streamed buckets have it in their order. None: all.
    """
    kept = frozenset(resident)
    copies_s: dict[str, float] = {}
    room = profile.total_bytes if pinned_bytes is None else pinned_bytes
    for bucket in profile.buckets:
        if bucket.name not in kept:
            is_pinned = bucket.nbytes <= room
            room -= bucket.nbytes if is_pinned else 0
            rate = profile.link_bytes_per_s if is_pinned else profile.pageable_bytes_per_s
            copies_s[bucket.name] = bucket.nbytes / rate
    forward = [(b, copies_s.get(b.name), b.forward_s) for b in profile.buckets]
    streams = [bucket for bucket in profile.buckets if bucket.name in copies_s]
    still_there = _last_within(streams, ring_bytes)
    again_s = {**copies_s, **dict.fromkeys(still_there, 0.0)}
    backward = [(b, again_s.get(b.name), b.backward_s) for b in reversed(profile.buckets)]
    passes = sum(_pass_s(work, ring_bytes, overlaps=profile.overlaps) for work in (forward, backward))
    compute_s = sum(bucket.forward_s + bucket.backward_s for bucket in profile.buckets)
    streamed = sum(bucket.nbytes for bucket in streams)
    kept_bytes = profile.total_bytes - streamed
    sizes = (bucket.nbytes for bucket in streams)
    return Prediction(
        step_s=passes + profile.other_s,
        link_s=sum(copies_s.values()) + sum(again_s.values()),
        compute_s=compute_s + profile.other_s,
        moved_bytes=2 * streamed - sum(still_there.values()),
        peak_bytes=profile.other_bytes + kept_bytes + slot_bytes(sizes, ring_bytes=ring_bytes),
    )


def slot_bytes(sizes: Iterable[int], *, ring_bytes: int) -> int:
    """Return the target memory that streaming takes.

    What is in use, or on its way, keeps to the room for streaming. Free slots come on top: those of large
    blocks serve no much smaller ones, and stay, since recordings rely on where they are. So blocks of very
    different sizes have a room each.

    Args:
        sizes: Bytes of the buckets that are streamed.
        ring_bytes: The room for streaming.
    """
    rooms: list[int] = []
    largest = 0
    for nbytes in sorted(sizes, reverse=True):
        if not rooms or largest > largest_reused(nbytes):
            rooms.append(0)
            largest = nbytes
        rooms[-1] += nbytes
    return sum(min(ring_bytes, room) for room in rooms)


def _last_within(streams: Sequence[BucketProfile], ring_bytes: int) -> dict[str, int]:
    """Return name and size of the last buckets that fit the room for streaming together."""
    found: dict[str, int] = {}
    for bucket in reversed(streams):
        if sum(found.values()) + bucket.nbytes > ring_bytes:
            break
        found[bucket.name] = bucket.nbytes
    return found


def _pass_s(
    work: Sequence[tuple[BucketProfile, float | None, float]], ring_bytes: int, *, overlaps: bool
) -> float:
    """Return the seconds of one pass; ``work`` is each bucket with its copy's and its computation's."""
    if not overlaps:
        return sum((copy_s or 0.0) + compute_s for _, copy_s, compute_s in work)
    link_free_s = compute_end_s = 0.0
    in_ring: list[tuple[int, float]] = []  # bytes, and when the computation is done with them
    for bucket, copy_s, compute_s in work:
        arrived_s = 0.0
        if copy_s is not None:
            start_s = link_free_s
            while in_ring and sum(nbytes for nbytes, _ in in_ring) + bucket.nbytes > ring_bytes:
                start_s = max(start_s, in_ring.pop(0)[1])
            link_free_s = arrived_s = start_s + copy_s
        compute_end_s = max(compute_end_s, arrived_s) + compute_s
        if copy_s is not None:
            in_ring.append((bucket.nbytes, compute_end_s))
    return compute_end_s
