"""Strips of a picture on ranks: their borders at every resolution, and the rows that neighbours trade.

The method is spatial parallelism of convolutions (Dryden et al., arXiv:1903.06681). Strips need not be
equally high. What a rank sends and receives follows from sizes that all ranks know.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed as dist

from ..errors import PlanError
from .collectives import all_gather, all_to_all


def even_strips(rows: int, ranks: int) -> tuple[int, ...]:
    """Return how many of ``rows`` each rank gets; they differ by one at most."""
    least, more = divmod(rows, ranks)
    return tuple(least + (rank < more) for rank in range(ranks))


@dataclass(frozen=True)
class Strips:
    """The cut of one picture.

    Args:
        rows: Latent rows of each rank, at least one each.
        dim: The cut dim: -2 for height, -1 for width.
        rank: This rank's place in ``group``.
        group: The ranks; None if there is one.
    """

    rows: tuple[int, ...]
    dim: int
    rank: int
    group: dist.ProcessGroup | None

    def take(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's strip of a latent."""
        if whole.shape[self.dim] != sum(self.rows):
            raise PlanError(f"{tuple(whole.shape)} is cut into strips of {self.rows} rows")
        return whole.narrow(self.dim, sum(self.rows[: self.rank]), self.rows[self.rank]).contiguous()

    def heights(self, strip: torch.Tensor) -> tuple[int, ...]:
        """Return the rows of every rank at the resolution of this rank's ``strip``."""
        return self.heights_of(strip.shape[self.dim])

    def heights_of(self, height: int) -> tuple[int, ...]:
        """Return the rows of every rank where this rank has ``height``."""
        scale, rest = divmod(height, self.rows[self.rank])
        if rest or scale < 1:
            raise PlanError(
                f"a strip of {self.rows[self.rank]} latent rows has become one of {height}, "
                "which is no multiple"
            )
        return tuple(rows * scale for rows in self.rows)

    def sides(self, strip: torch.Tensor, radius: int) -> tuple[int, int]:
        """Return how many rows there are above and below a strip, ``radius`` at most."""
        heights = self.heights(strip)
        above, below = sum(heights[: self.rank]), sum(heights[self.rank + 1 :])
        return min(radius, above), min(radius, below)

    def extend(self, strip: torch.Tensor, radius: int) -> torch.Tensor:
        """Return the strip with up to ``radius`` rows of its neighbours on each side; collective.

        Args:
            strip: This rank's rows ``[..., rows, columns]``; all ranks' differ along the cut dim only.
            radius: Rows wanted. Where strips are lower than that, ranks further away send theirs.
        """
        heights = self.heights(strip)
        stops = list(accumulate(heights))
        spans = [(stop - height, stop) for stop, height in zip(stops, heights, strict=True)]
        wanted = [(max(0, start - radius), min(stops[-1], stop + radius)) for start, stop in spans]
        mine, rows = spans[self.rank], strip.movedim(self.dim, 0)
        row_size = rows[0].numel()
        others = [rank for rank in range(len(heights)) if rank != self.rank]
        send = {rank: _overlap(wanted[rank], mine) for rank in others}
        receive = {rank: _overlap(wanted[self.rank], spans[rank]) for rank in others}
        parts = [rows[start - mine[0] : stop - mine[0]].reshape(-1) for start, stop in send.values()]
        assert self.group is not None
        received = all_to_all(
            torch.cat(parts),
            _sizes(send, len(heights), row_size),
            receive_sizes=_sizes(receive, len(heights), row_size),
            group=self.group,
        )
        got = received.view(-1, *rows.shape[1:]).movedim(0, self.dim)
        above = mine[0] - wanted[self.rank][0]
        below = wanted[self.rank][1] - mine[1]
        top, bottom = got.split([above, below], dim=self.dim)
        return torch.cat([top, strip, bottom], dim=self.dim)

    def gather(self, strip: torch.Tensor) -> torch.Tensor:
        """Return the rows of all ranks; collective."""
        assert self.group is not None
        whole = all_gather(strip.movedim(self.dim, 0), self.heights(strip), group=self.group)
        return whole.movedim(0, self.dim)


def _overlap(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    start = max(one[0], other[0])
    return start, max(start, min(one[1], other[1]))


def _sizes(spans: dict[int, tuple[int, int]], ranks: int, row_size: int) -> Sequence[int]:
    sizes = [0] * ranks
    for rank, (start, stop) in spans.items():
        sizes[rank] = (stop - start) * row_size
    return sizes
