"""Strips of a picture: sizes, and rows traded between real gloo processes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from comfyui_ferry.core.errors import PlanError
from comfyui_ferry.core.parallel.strips import Strips, even_strips
from ferry_support.ranks import run_ranks


def test_even_strips_differ_by_one_row_at_most() -> None:
    assert even_strips(10, 4) == (3, 3, 2, 2)
    assert even_strips(2, 3) == (1, 1, 0)


def _extend(whole: torch.Tensor, rows: tuple[int, ...], radius: int) -> list[torch.Tensor]:
    seen = []
    for dim in (-2, -1):
        strips = Strips(rows, dim, dist.get_rank(), dist.group.WORLD)
        picture = whole if dim == -2 else whole.mT.contiguous()
        # At twice the resolution, as after an upsampling.
        strip = strips.take(picture).repeat_interleave(2, dim)
        seen += [strips.extend(strip, radius), strips.gather(strip)]
    return seen


def test_neighbours_rows_arrive_also_from_ranks_further_away() -> None:
    whole, rows, radius = torch.arange(60.0).view(2, 6, 5), (1, 3, 1, 1), 3
    tall = whole.repeat_interleave(2, -2)
    for rank, (row, full_row, column, full_column) in enumerate(run_ranks(_extend, 4, whole, rows, radius)):
        start, stop = 2 * sum(rows[:rank]), 2 * sum(rows[: rank + 1])
        expected = tall[:, max(0, start - radius) : stop + radius]
        assert torch.equal(row, expected) and torch.equal(column, expected.mT)
        assert torch.equal(full_row, tall) and torch.equal(full_column, tall.mT)


def test_a_height_that_is_no_multiple_is_an_error() -> None:
    strips = Strips((3, 2), -2, 1, None)
    with pytest.raises(PlanError, match="which is no multiple"):
        strips.heights(torch.zeros(1, 5, 4))
    with pytest.raises(PlanError, match="is cut into strips"):
        strips.take(torch.zeros(1, 6, 4))
