"""Aspect-ratio buckets: pictures of about one shape share a size, and all sizes have about one area.

The idea is NovelAI's (blog.novelai.net, "NovelAI improvements on Stable Diffusion", 2022): a square
crop cuts heads off, and batches need one size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...errors import RequestError

MAX_ASPECT = 4.0
"""Longest side by shortest; beyond it the area could not be kept without a sliver of a picture."""


@dataclass(frozen=True, order=True)
class Bucket:
    """One size of training pictures, in pixels."""

    width_px: int
    height_px: int

    def __str__(self) -> str:
        return f"{self.width_px}x{self.height_px}"


def list_buckets(*, resolution_px: int, step_px: int) -> list[Bucket]:
    """Return the buckets of about ``resolution_px ** 2`` pixels, never more.

    Args:
        resolution_px: Side of the square bucket.
        step_px: Both sides of every bucket are multiples of it.

    Raises:
        RequestError: If not even a square of one step fits.
    """
    if step_px < 1 or resolution_px < step_px:
        raise RequestError(
            f"resolution={resolution_px} was asked with steps of {step_px} pixels",
            limit="A bucket is at least one step wide and high",
            way_out=f"Raise the resolution to at least {max(step_px, 1)}",
        )
    area = resolution_px**2
    found = set()
    for width in range(step_px, int(resolution_px * math.sqrt(MAX_ASPECT)) + 1, step_px):
        height = area // width // step_px * step_px
        if height and max(width / height, height / width) <= MAX_ASPECT:
            found |= {Bucket(width, height), Bucket(height, width)}
    side = resolution_px // step_px * step_px
    return sorted(found | {Bucket(side, side)})


def choose_bucket(width_px: int, height_px: int, buckets: list[Bucket]) -> Bucket:
    """Return the bucket whose aspect is closest; of two alike, the larger."""
    aspect = math.log(width_px / height_px)

    def distance(bucket: Bucket) -> tuple[float, int]:
        difference = abs(math.log(bucket.width_px / bucket.height_px) - aspect)
        # Rounded, so that a size and its mirror image never differ by the last bit of a logarithm.
        return round(difference, 9), -bucket.width_px * bucket.height_px

    return min(buckets, key=distance)
