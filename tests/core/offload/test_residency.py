from __future__ import annotations

import pytest
import torch
from comfyui_ferry.core.offload.buckets import Bucket, Segment
from comfyui_ferry.core.offload.pinned_arena import PinnedArena
from comfyui_ferry.core.offload.residency import Residency
from comfyui_ferry.core.offload.segments import group_overlapping
from comfyui_ferry.core.offload.tensors import Entry, PlainTensor
from comfyui_ferry.core.offload.transfer import Transfer
from torch import nn

SIZE = 1024


def make_bucket(value: float) -> Bucket:
    parameter = nn.Parameter(torch.full((SIZE // 4,), value), requires_grad=False)
    module = nn.Module()
    tensor = PlainTensor(parameter, [Entry(module, {}, "w", "w", True)])
    (plan,) = group_overlapping([parameter])
    segment = Segment(plan.nbytes, [tensor])
    tensor.places = [(segment, plan.layouts[0][1])]
    bucket = Bucket("b", [segment])
    bucket.place(PinnedArena([bucket.nbytes], pin=False).allocate(bucket.nbytes))
    segment.host.copy_(parameter.view(torch.uint8))
    tensor.attach()
    return bucket


@pytest.fixture
def residency() -> Residency:
    return Residency(Transfer(torch.device("cpu")), cache_limit_bytes=2 * SIZE)


def content(residency: Residency, bucket: Bucket) -> float:
    slot = residency.fetch(bucket)
    return slot.flat[: bucket.nbytes].view(torch.float32).unique().item()


def test_a_cached_bucket_is_not_copied_again_and_the_oldest_goes_first(residency):
    buckets = [make_bucket(value) for value in (1.0, 2.0, 3.0)]
    for bucket in buckets[:2]:
        assert content(residency, bucket) == bucket.segments[0].tensors[0].tensor[0].item()
        residency.cache(bucket)
    residency.fetch(buckets[0])
    assert residency.transfer.moved_to_target_bytes == 2 * SIZE
    assert content(residency, buckets[2]) == 3.0
    residency.cache(buckets[2])
    assert [bucket.slot is not None for bucket in buckets] == [True, False, True]
    assert residency.resident_bytes == 2 * SIZE
    assert residency.peak_resident_bytes == 2 * SIZE


def test_a_pinned_bucket_stays(residency):
    first, *others = (make_bucket(value) for value in (1.0, 2.0, 3.0, 4.0))
    residency.fetch(first)
    residency.pin(first)
    for bucket in others:
        residency.fetch(bucket)
        residency.cache(bucket)
    assert first.slot is not None
    residency.drop_cached()
    assert residency.resident_bytes == SIZE


def test_a_viewed_slot_is_held_until_its_view_dies(residency):
    bucket, other = make_bucket(1.0), make_bucket(2.0)
    view = residency.fetch(bucket).flat[:4]
    residency.drop(bucket)
    assert residency.resident_bytes == SIZE
    assert content(residency, other) == 2.0
    assert view.view(torch.float32).item() == 1.0
    residency.drop(other)
    del view
    assert residency.resident_bytes == 0
    assert residency.pool.allocated_bytes == 2 * SIZE


def test_a_held_slot_serves_again_while_it_is_current(residency):
    bucket = make_bucket(1.0)
    view = residency.fetch(bucket).flat[:4]
    residency.drop(bucket)
    residency.fetch(bucket)
    assert residency.transfer.moved_to_target_bytes == SIZE
    residency.drop(bucket)
    bucket.segments[0].tensors[0].tensor.fill_(5.0)
    assert content(residency, bucket) == 5.0
    assert view.view(torch.float32).item() == 1.0


def test_a_changed_master_is_copied_again(residency):
    bucket = make_bucket(1.0)
    assert content(residency, bucket) == 1.0
    residency.cache(bucket)
    bucket.segments[0].tensors[0].tensor.fill_(9.0)
    assert content(residency, bucket) == 9.0


def test_slots_are_used_again_and_trimmed(residency):
    for value in range(5):
        bucket = make_bucket(float(value))
        residency.fetch(bucket)
        residency.drop(bucket)
    assert residency.pool.allocated_bytes == SIZE
    residency.pool.trim(0)
    assert residency.pool.allocated_bytes == 0


def test_out_of_memory_gives_up_the_cache_first(residency, monkeypatch):
    cached, wanted = make_bucket(1.0), make_bucket(2.0)
    residency.fetch(cached)
    residency.cache(cached)
    allocate = residency.transfer.allocate

    def limited(nbytes):
        if residency.pool.allocated_bytes:
            raise torch.OutOfMemoryError("full")
        return allocate(nbytes)

    monkeypatch.setattr(residency.transfer, "allocate", limited)
    assert content(residency, wanted) == 2.0
    assert cached.slot is None
    residency.pin(wanted)
    with pytest.raises(torch.OutOfMemoryError):
        residency.fetch(cached)
    assert cached.slot is None and residency.resident_bytes == SIZE


def test_a_kept_bucket_that_streams_again_counts_as_streamed(residency):
    bucket = make_bucket(1.0)
    residency.set_kept([bucket], cache_limit_bytes=2 * SIZE)
    residency.fetch(bucket)
    assert residency.kept_bytes == SIZE
    residency.stream(bucket)
    assert content(residency, bucket) == 1.0
    assert residency.transfer.moved_to_target_bytes == SIZE  # from the slot that it had
    assert (residency.kept_bytes, residency.resident_bytes) == (0, SIZE)
    residency.drop(bucket)
    assert (residency.kept_bytes, residency.resident_bytes) == (0, 0)
