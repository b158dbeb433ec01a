"""What of a streamed model stays on the target: of each block the first part, the whole, or nothing.

What does not stay is copied for every pass into one of a few slots, all as large as the largest such
rest. So a little of every block is better than some blocks whole: the slots get smaller, and what they
give back can stay too. And the rests follow their blocks' sizes, because a copy is hidden behind what
computes before it: a large rest after a small block would wait.

What this module does not do: it moves nothing, and it measures neither link nor computation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

_NUM_CANDIDATES = 6
_NUM_PASSES = 4
# Irrational, so that multiples of it are spread evenly over [0, 1), however many there are.
_SPREAD = 0.6180339887498949


def choose_kept(
    cuts: Sequence[Sequence[int]], capacity_bytes: int, *, num_slots: int, least_slot_bytes: int = 0
) -> list[int]:
    """Return for each block how many of its first bytes stay.

    Of the slot sizes that are possible, that one is taken with which passes last least in a model of the
    schedule: as the mean of a link that decides alone and of one as fast as the computation.

    Args:
        cuts: For each block, in the order in which they run, how much of it may stay: ascending, from 0 to
            its size.
        capacity_bytes: Most that what stays and the slots may take together; less than ``least_needed``
            counts as that.
        num_slots: How many slots there are.
        least_slot_bytes: What they are at least, for the sake of others.
    """
    sizes = [places[-1] for places in cuts]
    excess = sum(sizes) + num_slots * least_slot_bytes - capacity_bytes
    if excess <= 0:
        return sizes
    best, best_s = sizes, float("inf")
    needed = _needed_by_slot(cuts, num_slots, least_slot_bytes)
    least = min(needed.values())
    if least > capacity_bytes:
        slot_bytes = min(needed, key=lambda each: (needed[each], -each))
        return [_least_kept(places, slot_bytes) for places in cuts]
    for slot_bytes in _slot_candidates(needed, capacity_bytes):
        room = capacity_bytes - num_slots * max(slot_bytes, least_slot_bytes)
        kept = _share_out(cuts, slot_bytes, room)
        rests = [size - stays for size, stays in zip(sizes, kept, strict=True)]
        compute = [excess * size / sum(sizes) for size in sizes]
        needed_s = pass_seconds([0.0] * len(sizes), rests, num_slots) + pass_seconds(
            compute, rests, num_slots
        )
        if needed_s < best_s:
            best, best_s = kept, needed_s
    return best


def pass_seconds(compute: Sequence[float], copies: Sequence[float], num_slots: int) -> float:
    """Return what a pass takes when passes follow one another, in a model of the schedule.

    Blocks compute one after the other, each once its copy is there; copies follow one another, each once
    the block that had its slot has computed.

    Args:
        compute: Seconds of each block's computation.
        copies: Seconds of each block's copy, 0 for one that stays.
        num_slots: Blocks that are on the target, or on their way, at most.
    """
    now = link_free = first_pass_end = 0.0
    released: list[float] = []
    arrivals: list[float] = []
    streamed = [copy for copy in copies if copy]
    for index in range(_NUM_PASSES):
        for seconds, copy in zip(compute, copies, strict=True):
            if copy:
                # Those ahead are started as soon as a slot is free, over the end of a pass as well.
                while len(arrivals) < len(released) + num_slots:
                    begin = len(arrivals) - num_slots
                    free = released[begin] if begin >= 0 else 0.0
                    link_free = max(link_free, free) + streamed[len(arrivals) % len(streamed)]
                    arrivals.append(link_free)
                now = max(now, arrivals[len(released)])
            now += seconds
            if copy:
                released.append(now)
        if index == 0:
            first_pass_end = now
    return (now - first_pass_end) / (_NUM_PASSES - 1)


def least_needed(cuts: Sequence[Sequence[int]], num_slots: int, least_slot_bytes: int = 0) -> int:
    """Return the least that what stays and the slots can take together; arguments as in ``choose_kept``."""
    return min(_needed_by_slot(cuts, num_slots, least_slot_bytes).values())


def _needed_by_slot(cuts: Sequence[Sequence[int]], num_slots: int, least_slot_bytes: int) -> dict[int, int]:
    """Return for each possible size of a slot, ascending, what has to stay with it and the slots."""
    rests = sorted({places[-1] - place for places in cuts for place in places})
    return {
        slot_bytes: sum(_least_kept(places, slot_bytes) for places in cuts)
        + num_slots * max(slot_bytes, least_slot_bytes)
        for slot_bytes in rests or [0]
    }


def _slot_candidates(needed: Mapping[int, int], capacity_bytes: int) -> Iterator[int]:
    """Yield sizes of a slot with which everything fits, from the smallest on."""
    fitting = [slot_bytes for slot_bytes, nbytes in needed.items() if nbytes <= capacity_bytes]
    step = max(1, -(-len(fitting) // _NUM_CANDIDATES))
    yield from fitting[::step]


def _least_kept(places: Sequence[int], slot_bytes: int) -> int:
    return next(place for place in places if places[-1] - place <= slot_bytes)


def _share_out(cuts: Sequence[Sequence[int]], slot_bytes: int, room: int) -> list[int]:
    """Return what stays of each block if at most ``slot_bytes`` of one stream and ``room`` stay in all."""
    options = [[place for place in places if places[-1] - place <= slot_bytes] for places in cuts]
    share = _rest_share(options, sum(places[-1] for places in options) - room)
    kept: list[int] = []
    debt = 0.0
    for places in options:
        size = places[-1]
        debt += min(size - places[0], share * size)
        kept.append(min(places, key=lambda place, size=size, debt=debt: abs(size - place - debt)))
        debt -= size - kept[-1]
    used = sum(kept)
    while used > room:
        index = max(_changeable(options, kept, -1), key=lambda i: (kept[i] / options[i][-1], _rank(i)))
        used += _step(options, kept, index, -1)
    while True:
        growing = [
            index
            for index in _changeable(options, kept, 1)
            if _next(options[index], kept[index], 1) - kept[index] <= room - used
        ]
        if not growing:
            return kept
        index = min(growing, key=lambda i: (kept[i] / options[i][-1], _rank(i)))
        used += _step(options, kept, index, 1)


def _rest_share(options: Sequence[Sequence[int]], wanted: int) -> float:
    """Return the share of every block that streams, so that ``wanted`` bytes do and no block too many."""
    low, high = 0.0, 1.0
    for _ in range(40):
        share = (low + high) / 2
        streamed = sum(min(places[-1] - places[0], share * places[-1]) for places in options)
        low, high = (share, high) if streamed < wanted else (low, share)
    return high


def _rank(index: int) -> float:
    return index * _SPREAD % 1.0


def _changeable(options: Sequence[Sequence[int]], kept: Sequence[int], direction: int) -> list[int]:
    end = -1 if direction > 0 else 0
    return [index for index, places in enumerate(options) if kept[index] != places[end]]


def _next(places: Sequence[int], place: int, direction: int) -> int:
    return places[places.index(place) + direction]


def _step(options: Sequence[Sequence[int]], kept: list[int], index: int, direction: int) -> int:
    """Let the next more (1) or less (-1) of a block stay; returns by how much."""
    before, kept[index] = kept[index], _next(options[index], kept[index], direction)
    return kept[index] - before
