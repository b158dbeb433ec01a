from __future__ import annotations

import pytest
import torch
from comfyui_ferry.core.errors import PlanError
from comfyui_ferry.core.parallel.attention import lse
from comfyui_ferry.core.parallel.attention.lse import attend_part, choose_backend, plain_attention
from ferry_support.parity import relative_error
from ferry_support.tiny_models import noise
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

PARTS = (4, 1, 7)
Q, K, V = noise(2, 3, 9, 8), noise(2, 3, 12, 8, seed=1), noise(2, 3, 12, 8, seed=2)
MASKS = {
    "none": None,
    "float": noise(1, 1, 9, 12),
    "bool": noise(2, 3, 9, 12) > 0,
    "keys": noise(2, 1, 1, 12) > -0.5,
    # Query 2 sees nothing of the second part, query 3 nothing of the first two.
    "part without keys": torch.ones(9, 12).index_put(
        (torch.tensor([2, 3, 3, 3, 3, 3]), torch.tensor([4, 0, 1, 2, 3, 4])), torch.tensor(0.0)
    )[None, None]
    > 0,
}


def merged(q, k, v, mask, *, attend=attend_part, scale=None) -> torch.Tensor:
    result, start = None, 0
    for size in PARTS:
        stop = start + size
        columns = None if mask is None else mask[..., start:stop]
        part = attend(q, k[:, :, start:stop], v[:, :, start:stop], mask=columns, scale=scale)
        result = part if result is None else result.merge(part)
        start = stop
    assert result is not None
    return result.output(q.dtype).transpose(1, 2)


@pytest.mark.parametrize("attend", [attend_part, plain_attention])
@pytest.mark.parametrize("scale", [None, 0.7])
@pytest.mark.parametrize("name", MASKS)
def test_parts_merge_to_the_whole(name: str, scale: float | None, attend) -> None:
    expected = F.scaled_dot_product_attention(Q, K, V, attn_mask=MASKS[name], scale=scale)
    # fp32; only the order of sums over keys differs.
    assert relative_error(merged(Q, K, V, MASKS[name], attend=attend, scale=scale), expected) <= 2e-6


def test_the_order_of_parts_does_not_matter_where_scores_are_extreme() -> None:
    q, k = Q * 40, K * 40
    expected = F.scaled_dot_product_attention(q, k, V)
    assert relative_error(merged(q, k, V, None), expected) <= 1e-5
    assert relative_error(merged(q, k.flip(2), V.flip(2), None), expected) <= 1e-5


def test_a_query_without_any_key_gets_zeros() -> None:
    mask = torch.ones(9, 12, dtype=torch.bool)
    mask[5] = False
    output = merged(Q, K, V, mask[None, None])
    assert torch.equal(output[:, :, 5], torch.zeros_like(output[:, :, 5]))
    assert torch.isfinite(output).all()


def test_finite_masks_of_the_lowest_number_give_the_mean_as_on_one_rank() -> None:
    mask = torch.full((1, 1, 9, 12), torch.finfo(torch.float32).min)
    expected = F.scaled_dot_product_attention(Q, K, V, attn_mask=mask)
    assert relative_error(merged(Q, K, V, mask), expected) <= 2e-6


@pytest.mark.parametrize("name", MASKS)
def test_queries_in_pieces_change_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = merged(Q, K, V, MASKS[name], attend=plain_attention)
    seen: list[int] = []
    monkeypatch.setattr(lse, "_SCORES_BYTES", 2 * 3 * 7 * 4 * 2)
    cat = torch.cat
    monkeypatch.setattr(torch, "cat", lambda pieces, dim: seen.append(len(pieces)) or cat(pieces, dim))
    assert relative_error(merged(Q, K, V, MASKS[name], attend=plain_attention), whole) <= 1e-6
    assert max(seen) == 5  # nine queries, two at a time


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_merged_in_fp32(dtype: torch.dtype) -> None:
    q, k, v = Q.to(dtype), K.to(dtype), V.to(dtype)
    output = merged(q, k, v, None)
    assert output.dtype is dtype
    expected = F.scaled_dot_product_attention(q.float(), k.float(), v.float())
    # Two roundings: of each part's output, and of the result.
    assert relative_error(output.float(), expected) <= 2 * torch.finfo(dtype).eps


def test_float64_stays_float64() -> None:
    q, k, v = Q.double(), K.double(), V.double()
    assert relative_error(merged(q, k, v, None), F.scaled_dot_product_attention(q, k, v)) <= 1e-14


def test_the_kernel_follows_device_dtype_and_mask() -> None:
    assert choose_backend(Q, K, V, mask=None) is SDPBackend.FLASH_ATTENTION
    assert choose_backend(Q, K, V, mask=MASKS["float"]) is SDPBackend.MATH
    assert choose_backend(Q.double(), K.double(), V.double(), mask=None) is SDPBackend.MATH


def test_masks_of_other_kinds_are_refused() -> None:
    with pytest.raises(PlanError, match="bool or floating, got"):
        attend_part(Q, K, V, mask=torch.ones(9, 12).long(), scale=None)


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", [*MASKS, "no key"])
def test_gpu_kernels_equal_fp32(name: str, dtype: torch.dtype, head_dim: int, scale: float | None) -> None:
    mask = MASKS.get(name)
    if name == "no key":
        mask = torch.ones(1, 1, 9, 12, dtype=torch.bool)
        mask[..., 5, :] = False
    q, k, v = (tensor.repeat(1, 1, 1, head_dim // 8).to("cuda", dtype) for tensor in (Q, K, V))
    mask = None if mask is None else mask.cuda()
    expected = F.scaled_dot_product_attention(
        q.double(), k.double(), v.double(),
        attn_mask=mask.double() if mask is not None and mask.is_floating_point() else mask, scale=scale,
    )  # fmt: skip
    output = merged(q, k, v, mask, scale=scale)
    assert torch.isfinite(output).all()
    if name == "no key":
        assert not output[:, :, 5].any()
    # bf16 and fp16: each part's output, the probabilities inside and the result are rounded. A fused
    # kernel also adds the mask in that precision.
    limit = 1e-5 if dtype is torch.float32 else 4 * torch.finfo(dtype).eps
    assert relative_error(output.double(), expected) <= limit


@pytest.mark.gpu
def test_gpu_kernels_are_the_fused_ones_in_half_precision() -> None:
    q, k, v = (noise(1, 4, 256, 128, seed=seed).cuda().bfloat16() for seed in range(3))
    mask = torch.ones(1, 1, 1, 256, dtype=torch.bool, device="cuda")
    fused = {SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION}
    assert choose_backend(q, k, v, mask=None) in fused
    assert choose_backend(q, k, v, mask=mask) in {SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION}
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        assert choose_backend(q, k, v, mask=None) is SDPBackend.FLASH_ATTENTION
        assert choose_backend(q, k, v, mask=mask) is SDPBackend.MATH
    assert choose_backend(q.float(), k.float(), v.float(), mask=None) is SDPBackend.MATH


@pytest.mark.gpu
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize(
    "backend",
    [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION],
    ids=str,
)
def test_each_gpu_kernel_merges(backend: SDPBackend, name: str) -> None:
    q, k, v = (tensor.repeat(1, 1, 1, 16).cuda().bfloat16() for tensor in (Q, K, V))
    mask = MASKS[name]
    mask = None if mask is None else mask.cuda()
    with sdpa_kernel(backend):
        if choose_backend(q, k, v, mask=mask) is not backend:
            pytest.skip("this GPU, this PyTorch or this kernel cannot take it")
        output = merged(q, k, v, mask)
    exact = mask.double() if mask is not None and mask.is_floating_point() else mask
    expected = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), attn_mask=exact)
    assert relative_error(output.double(), expected) <= 4 * torch.finfo(torch.bfloat16).eps
