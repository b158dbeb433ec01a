from __future__ import annotations

import ctypes

import pytest
import torch
from comfyui_ferry.core.errors import OffloadError
from comfyui_ferry.core.offload import HostParts, row_copies


class _Driver:
    """Copies as the CUDA driver does, from host to host."""

    code = 0

    def cuMemcpy2DAsync_v2(self, described, stream) -> int:
        call = described._obj
        for row in range(call.height):
            ctypes.memmove(
                call.target_device + row * call.target_pitch,
                call.source_host + row * call.source_pitch,
                call.width_bytes,
            )
        return self.code


class _Stream:
    cuda_stream = 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_rows_reach_their_place_by_what_the_driver_is_told(monkeypatch, dtype):
    driver = _Driver()
    monkeypatch.setattr(row_copies, "driver", lambda: driver)
    whole = torch.arange(4 * 6 * 5).view(4, 6, 5).to(dtype)
    parts = HostParts()
    for dim, ranges in ((0, [(1, 3)]), (1, [(0, 2), (5, 6)]), (2, [(4, 5), (0, 1)]), (2, [(0, 5)])):
        pieces = [whole.narrow(dim, first, stop - first) for first, stop in ranges]
        part, expected = parts.stand_in(pieces, dim), torch.cat(pieces, dim)
        assert part.shape == expected.shape and part.is_contiguous()
        made = torch.zeros_like(expected)
        for source, target in parts.copies(part, made.view(torch.uint8).view(-1)):
            row_copies.copy_to_gpu(source, target, _Stream())
        assert torch.equal(made, expected)
        assert torch.equal(parts.filled(torch.nn.Parameter(part, requires_grad=False)), expected)
    driver.code = 700
    with pytest.raises(OffloadError, match="700"):
        row_copies.copy_to_gpu(torch.zeros(3, 8, dtype=torch.uint8)[:, :2],
                               torch.zeros(3, 2, dtype=torch.uint8), _Stream())  # fmt: skip
    with pytest.raises(ValueError, match="no rows"):
        row_copies.describe_rows(torch.zeros(3, 4), torch.zeros(3, 4))


def test_a_part_takes_no_memory():
    whole = torch.ones(64, 1 << 20, dtype=torch.uint8)
    before = _resident_bytes()
    part = HostParts().stand_in([whole[:, : 1 << 19]], 1)
    assert part.nbytes == whole.nbytes // 2 and _resident_bytes() - before < part.nbytes // 8
    for piece in (whole.t(), whole[:, ::2]):
        with pytest.raises(ValueError, match="strides"):
            HostParts().stand_in([piece], 1)


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


@pytest.mark.gpu
def test_the_gpu_reads_rows_where_they_are():
    whole = torch.randn(1000, 3072).to(torch.bfloat16).pin_memory()
    parts, stream = HostParts(), torch.cuda.Stream()
    for dim, ranges in ((1, [(100, 1500), (3000, 3072)]), (0, [(3, 700), (900, 901)])):
        part = parts.stand_in([whole.narrow(dim, first, stop - first) for first, stop in ranges], dim)
        made = torch.zeros(part.shape, dtype=part.dtype, device="cuda")
        with torch.cuda.stream(stream):
            for source, target in parts.copies(part, made.view(torch.uint8).view(-1)):
                row_copies.copy_to_gpu(source, target, stream)
        stream.synchronize()
        assert torch.equal(made.cpu(), parts.filled(part))
