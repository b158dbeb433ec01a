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

# Rounding a side down to a step may not cost more of the area than this leaves.
_LEAST_AREA = 0.75


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
        RequestError: If the step is too coarse for the resolution.
    """
    area = resolution_px**2
    side = resolution_px // step_px * step_px
    if side**2 < _LEAST_AREA * area:
        raise RequestError(
            f"resolution={resolution_px} was asked with sides in steps of {step_px} pixels",
            limit=f"The largest square of such sides is {side}x{side}, far below that area",
            way_out=f"Use a multiple of {step_px}, for example {side + step_px}, or name a model family "
            "whose step is finer",
        )
    found = {Bucket(side, side)}
    for width in range(step_px, int(resolution_px * math.sqrt(MAX_ASPECT)) + 1, step_px):
        height = area // width // step_px * step_px
        is_close = width * height >= _LEAST_AREA * area
        if is_close and max(width / height, height / width) <= MAX_ASPECT:
            found |= {Bucket(width, height), Bucket(height, width)}
    return sorted(found)


def choose_bucket(width_px: int, height_px: int, buckets: list[Bucket]) -> Bucket:
    """Return the bucket whose aspect is closest; of two alike, the larger."""
    aspect = math.log(width_px / height_px)

    def distance(bucket: Bucket) -> tuple[float, int]:
        difference = abs(math.log(bucket.width_px / bucket.height_px) - aspect)
        # Rounded, so that a size and its mirror image never differ by the last bit of a logarithm.
        return round(difference, 9), -bucket.width_px * bucket.height_px

    return min(buckets, key=distance)
