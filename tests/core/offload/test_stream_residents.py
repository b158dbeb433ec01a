"""What stays of each block: within the capacity, with slots no larger than they must be, spread evenly."""

from __future__ import annotations

import random

import pytest
from comfyui_ferry.core.offload.stream_residents import choose_kept, pass_seconds

MB = 10**6
# Bytes of the tensors of one block each, without modulation: Qwen-Image, and FLUX.1's two kinds.
QWEN = [19 * MB] * 8 + [75 * MB] * 4
FLUX_DOUBLE = [57 * MB, 19 * MB, 75 * MB, 75 * MB] * 2
FLUX_SINGLE = [132 * MB, 94 * MB]


def cuts(tensors):
    places = [0]
    for nbytes in tensors:
        places.append(places[-1] + nbytes)
    return places


def test_extremes():
    blocks = [[0, 3], [0, 2, 4], [0, 5]]
    assert choose_kept(blocks, 12, num_slots=2) == [3, 4, 5]
    assert choose_kept(blocks, 10, num_slots=2) == [0, 0, 0]
    assert choose_kept(blocks, -7, num_slots=2) == [0, 0, 0]
    assert choose_kept([], 5, num_slots=2) == []
    # A slot that another model needs takes its room in any case.
    assert choose_kept([[0, 10]] * 4, 40, num_slots=1, least_slot_bytes=15).count(10) == 2
    assert choose_kept([[0]], 0, num_slots=1) == [0]


def test_whatever_the_blocks_are_it_fits():
    draw = random.Random(3)
    for _ in range(60):
        blocks = [cuts([draw.randrange(1, 90) for _ in range(draw.randrange(1, 7))]) for _ in range(17)]
        slots, others = draw.randrange(1, 4), draw.choice([0, 50])
        largest = max(max(places[-1] for places in blocks), others)
        capacity = draw.randrange(slots * largest, sum(places[-1] for places in blocks) + slots * largest)
        kept = choose_kept(blocks, capacity, num_slots=slots, least_slot_bytes=others)
        rests = [places[-1] - stays for places, stays in zip(blocks, kept, strict=True)]
        slot = max(others, *rests)
        assert all(stays in places for places, stays in zip(blocks, kept, strict=True))
        assert sum(kept) + slots * slot <= capacity
        # Nothing more would have fitted beside these slots.
        steps = [
            places[places.index(stays) + 1] - stays
            for places, stays in zip(blocks, kept, strict=True)
            if stays < places[-1]
        ]
        assert all(sum(kept) + step + slots * slot > capacity for step in steps)


def test_the_schedule_is_known():
    # One slot: every copy waits for the block before it. Two: only the link counts.
    assert pass_seconds([1, 1], [2, 2], 1) == 6
    assert pass_seconds([1, 1], [2, 2], 2) == 4
    assert pass_seconds([3, 3], [2, 2], 2) == 6
    assert pass_seconds([3, 3, 3, 3], [0, 5, 0, 0], 2) == 12
    assert pass_seconds([3, 3], [0, 0], 1) == 6


@pytest.mark.parametrize(
    ("blocks", "capacity_gb", "limit"),
    [([QWEN] * 60, (4, 8, 16), 1.05), ([FLUX_DOUBLE] * 19 + [FLUX_SINGLE] * 38, (4, 8), 1.06)],
)
def test_a_link_that_decides_alone_is_never_idle_and_moves_little_more_than_it_must(
    blocks, capacity_gb, limit
):
    places = [cuts(tensors) for tensors in blocks]
    sizes = [each[-1] for each in places]
    for capacity in (gb * 2**30 for gb in capacity_gb):
        kept = choose_kept(places, capacity, num_slots=2)
        rests = [size - stays for size, stays in zip(sizes, kept, strict=True)]
        least = sum(sizes) - capacity
        assert sum(rests) <= limit * least
        compute = [0.4 * least * size / sum(sizes) for size in sizes]
        assert pass_seconds(compute, rests, 2) == pytest.approx(sum(rests))
