from __future__ import annotations

import pytest
import torch
from comfyui_ferry.core.errors import OffloadError
from comfyui_ferry.core.offload import OffloadTrainingManager
from comfyui_ferry.core.offload.segments import align, extent_bytes, group_overlapping, raw_bytes


def members(tensors):
    return [[index for index, _ in plan.layouts] for plan in group_overlapping(tensors)]


def test_overlapping_views_form_one_segment_and_neighbours_do_not():
    flat = torch.arange(64, dtype=torch.float32)
    assert members([flat[:16], flat[8:24], flat[24:40], torch.ones(3)]) == [[0, 1], [2], [3]]
    assert members([flat[::2], flat[1::2]]) == [[0, 1]]


def test_two_storages_over_the_same_memory_form_one_segment():
    buffer = bytearray(64)
    a, b = torch.frombuffer(buffer, dtype=torch.uint8), torch.frombuffer(buffer, dtype=torch.float32)
    assert members([a, b]) == [[0, 1]]


def test_empty_tensors_stand_alone():
    flat = torch.ones(8)
    assert members([flat, torch.empty(0), flat[3:], torch.empty(2, 0)]) == [[0, 2], [1], [3]]


def test_a_segment_rebuilds_every_member():
    flat = torch.arange(48, dtype=torch.float32)
    tensors = [flat[3:30].view(3, 9).t(), flat[5:25:3], flat[7].expand(4), flat.view(torch.int32)[10:20]]
    (plan,) = group_overlapping(tensors)
    memory = torch.zeros(plan.nbytes + 64, dtype=torch.uint8)
    for index, layout in plan.layouts:
        start = 64 + layout.offset_bytes
        memory[start : start + extent_bytes(tensors[index])] = raw_bytes(tensors[index])
    for index, layout in plan.layouts:
        view = layout.view(memory.untyped_storage(), 64)
        assert torch.equal(view, tensors[index]) and view.stride() == tensors[index].stride()
        assert layout.fits(tensors[index])


def test_views_are_ordinary_tensors_under_inference_mode():
    with torch.inference_mode():
        (plan,) = group_overlapping([torch.ones(4)])
        view = plan.layouts[0][1].view(torch.zeros(64, dtype=torch.uint8).untyped_storage())
        assert not view.is_inference()


def test_alignment():
    assert [align(n) for n in (0, 1, 256, 257)] == [0, 256, 256, 512]


def test_tensors_at_odd_addresses_are_aligned_and_odd_pairs_refused():
    buffer = bytearray(range(200))
    odd = torch.frombuffer(buffer, dtype=torch.float32, offset=1, count=4)
    (plan,) = group_overlapping([odd])
    assert plan.layouts[0][1].offset_bytes == 0
    pair = [odd, torch.frombuffer(buffer, dtype=torch.float32, offset=3, count=4)]
    with pytest.raises(OffloadError, match="starts at byte 2"):
        group_overlapping(pair)


def test_a_model_over_a_files_bytes_keeps_its_values():
    module = torch.nn.Linear(2, 2)
    module.register_buffer("odd", torch.frombuffer(bytearray(range(41)), dtype=torch.int32, offset=1))
    before = module.odd.clone()
    with OffloadTrainingManager(module, "cpu"):
        assert torch.equal(module.odd, before)
    assert torch.equal(module.odd, before)
