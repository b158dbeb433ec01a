"""Which blocks stay: as much as fits, the streamed ones spread evenly."""

from __future__ import annotations

import pytest
from comfyui_ferry.core.offload.stream_residents import choose_residents


def test_extremes():
    assert choose_residents([3, 4, 5], 12) == {0, 1, 2}
    assert choose_residents([3, 4, 5], 0) == choose_residents([3, 4, 5], -7) == set()
    assert choose_residents([], 5) == set()


@pytest.mark.parametrize("sizes", [[10] * 60, [23] * 19 + [10] * 38])
def test_streamed_blocks_lie_evenly(sizes):
    for capacity in range(0, sum(sizes), 37):
        chosen = choose_residents(sizes, capacity)
        used = sum(sizes[index] for index in chosen)
        assert used <= capacity
        # Nothing more would have fitted.
        assert all(used + size > capacity for index, size in enumerate(sizes) if index not in chosen)
    half = choose_residents([10] * 60, 300)
    assert len(half) == 30 and all((index in half) != (index + 1 in half) for index in range(59))
