"""Buckets keep the area, the step and the aspect."""

from __future__ import annotations

import pytest
from comfyui_ferry.core.errors import RequestError
from comfyui_ferry.core.training.dataset import Bucket, choose_bucket, list_buckets


@pytest.mark.parametrize(("resolution", "step"), [(1024, 64), (1024, 16), (512, 64), (64, 16), (1000, 32)])
def test_every_bucket_has_the_area_and_the_step(resolution, step):
    buckets = list_buckets(resolution_px=resolution, step_px=step)
    assert len(buckets) == len(set(buckets)) > 4
    for bucket in buckets:
        assert bucket.width_px % step == bucket.height_px % step == 0
        assert Bucket(bucket.height_px, bucket.width_px) in buckets
        area = bucket.width_px * bucket.height_px
        assert 0.75 * resolution**2 <= area <= resolution**2
        assert max(bucket.width_px / bucket.height_px, bucket.height_px / bucket.width_px) <= 4


@pytest.mark.parametrize(
    ("size", "bucket"),
    [
        ((4000, 4000), (1024, 1024)),
        ((1536, 1024), (1216, 832)),
        ((1024, 1536), (832, 1216)),
        ((4000, 1000), (2048, 512)),
    ],
)
def test_the_closest_aspect_is_chosen(size, bucket):
    buckets = list_buckets(resolution_px=1024, step_px=64)
    assert choose_bucket(*size, buckets) == Bucket(*bucket)


def test_a_picture_and_its_transposed_get_transposed_buckets():
    buckets = list_buckets(resolution_px=768, step_px=32)
    for width in range(200, 800, 7):
        bucket = choose_bucket(width, 400, buckets)
        assert choose_bucket(400, width, buckets) == Bucket(bucket.height_px, bucket.width_px)


@pytest.mark.parametrize("resolution", [32, 100])
def test_a_step_too_coarse_for_the_resolution_is_refused(resolution):
    with pytest.raises(RequestError, match=f"resolution={resolution}"):
        list_buckets(resolution_px=resolution, step_px=64)
