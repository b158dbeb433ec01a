from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from comfyui_ferry.core.errors import PlanError
from comfyui_ferry.core.parallel.attention.masks import MaskMemo, head_slice
from comfyui_ferry.core.parallel.sequence import Stream, rank_major_order, split_sizes, take
from ferry_support.parity import world_group
from ferry_support.ranks import run_ranks
from ferry_support.tiny_models import noise


def streams(num_ranks: int, rank: int) -> tuple[Stream, ...]:
    return tuple(Stream(name, split_sizes(size, num_ranks), rank) for name, size in (("t", 2), ("i", 7)))


def _prepare(mask: torch.Tensor) -> torch.Tensor:
    memo = MaskMemo(world_group())
    mine = streams(dist.get_world_size(), dist.get_rank())
    prepared = memo.from_whole(mask, mine)
    assert memo.from_whole(mask, mine) is prepared
    return prepared


@pytest.mark.parametrize("shape", [(9, 9), (2, 9, 9), (1, 1, 1, 9), (2, 3, 9, 9)])
def test_a_whole_mask_follows_the_tokens(shape: tuple[int, ...]) -> None:
    mask = noise(*shape)
    order = rank_major_order(streams(3, 0), torch.device("cpu"))
    expected = mask[..., order] if shape[-2] == 1 else mask[..., order, :][..., order]
    for prepared in run_ranks(_prepare, 3, mask):
        assert torch.equal(prepared, expected)


def _gather(mask: torch.Tensor) -> torch.Tensor:
    mine = streams(dist.get_world_size(), dist.get_rank())
    memo = MaskMemo(world_group())
    whole = memo.from_local_keys(take(mask, mine, mask.ndim - 1), mine)
    # Later blocks bring equal masks and must cause no collective.
    assert memo.from_local_keys(take(mask, mine, mask.ndim - 1), mine) is whole
    return whole


@pytest.mark.parametrize("mask", [noise(2, 1, 9), noise(2, 1, 1, 9) > 0], ids=["float", "bool"])
def test_local_key_masks_are_joined_without_phantoms(mask: torch.Tensor) -> None:
    order = rank_major_order(streams(4, 0), torch.device("cpu"))
    for whole in run_ranks(_gather, 4, mask):
        assert torch.equal(whole, mask[..., order])


@pytest.mark.parametrize("shape", [(8, 9), (9, 8), (9,), (2, 5, 9)])
def test_masks_of_another_size_are_refused(shape: tuple[int, ...]) -> None:
    def prepare() -> None:
        with pytest.raises(PlanError, match="does not fit a sequence of 9"):
            MaskMemo(world_group()).from_whole(torch.zeros(shape), streams(1, 0))

    run_ranks(prepare, 1)


def test_a_local_mask_with_rows_is_refused() -> None:
    def gather() -> None:
        with pytest.raises(PlanError, match="expects a key mask"):
            MaskMemo(world_group()).from_local_keys(torch.zeros(9, 9), streams(1, 0))

    run_ranks(gather, 1)


def test_only_a_mask_with_heads_is_cut_by_heads() -> None:
    mask = noise(2, 3, 4, 4)
    assert torch.equal(head_slice(mask, 1, 2, num_heads=3), mask[:, 1:])
    for other in (noise(4, 4), noise(2, 4, 4), noise(2, 1, 4, 4)):
        assert head_slice(other, 1, 2, num_heads=3) is other
