from __future__ import annotations

import pytest
import torch
from comfyui_ferry.core.errors import PlanError
from comfyui_ferry.core.parallel import sequence
from comfyui_ferry.core.parallel.sequence import Stream


def streams(lengths: dict[str, int], num_ranks: int, rank: int) -> tuple[Stream, ...]:
    return tuple(
        Stream(name, sequence.split_sizes(length, num_ranks), rank) for name, length in lengths.items()
    )


@pytest.mark.parametrize(
    ("total", "parts", "sizes"),
    [(7, 3, (3, 2, 2)), (6, 3, (2, 2, 2)), (2, 4, (1, 1, 0, 0)), (0, 2, (0, 0)), (5, 1, (5,))],
)
def test_split_sizes(total: int, parts: int, sizes: tuple[int, ...]) -> None:
    assert sequence.split_sizes(total, parts) == sizes


def test_stream_ranges_tile_the_whole() -> None:
    parts = [Stream("s", (3, 2, 0), rank) for rank in range(3)]
    assert [(part.start, part.stop) for part in parts] == [(0, 3), (3, 5), (5, 5)]
    assert [part.carried_length for part in parts] == [3, 2, 1]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("dim", [1, 2])
def test_take_then_join_is_the_identity(num_ranks: int, dim: int) -> None:
    whole = torch.arange(2 * 12 * 12).view(2, 12, 12)
    lengths = {"text": 5, "image": 7}
    parts = []
    for rank in range(num_ranks):
        mine = streams(lengths, num_ranks, rank)
        local = sequence.take(whole, mine, dim)
        assert local.shape[dim] == sum(stream.carried_length for stream in mine)
        parts.append(sequence.drop_phantoms(local, mine, dim))
    first = streams(lengths, num_ranks, 0)
    assert [part.shape[dim] for part in parts] == list(sequence.joint_sizes(first))
    joined = torch.cat(parts, dim)
    assert torch.equal(sequence.to_canonical(joined, first, dim), whole)
    order = sequence.rank_major_order(first, torch.device("cpu"))
    assert torch.equal(whole.index_select(dim, order), joined)


def test_an_empty_part_carries_one_phantom_of_zeros() -> None:
    mine = streams({"text": 1, "image": 2}, num_ranks=2, rank=1)
    local = sequence.take(torch.ones(1, 3, 4), mine, 1)
    assert torch.equal(local, torch.tensor([0.0, 1.0]).view(1, 2, 1).expand(1, 2, 4))
    real = sequence.drop_phantoms(local, mine, 1)
    assert torch.equal(real, torch.ones(1, 1, 4))
    assert torch.equal(sequence.restore_phantoms(real, mine, 1), local)


def test_take_owns_its_memory() -> None:
    whole = torch.zeros(1, 4, 2)
    local = sequence.take(whole, streams({"image": 4}, 2, 0), 1)
    local += 1
    assert whole.sum() == 0
    assert local.untyped_storage().nbytes() == local.nbytes


def test_lengths_that_do_not_fit_are_refused() -> None:
    mine = streams({"text": 5, "image": 7}, 2, 0)
    with pytest.raises(PlanError, match=r"text \(5 tokens\) \+ image \(7 tokens\).*whole length, 12"):
        sequence.take(torch.zeros(1, 11), mine, 1)
    with pytest.raises(PlanError, match="this rank's length, 7"):
        sequence.drop_phantoms(torch.zeros(1, 12), mine, 1)
    with pytest.raises(PlanError, match="dim 3"):
        sequence.check_carried(torch.zeros(1, 7), mine, 3)
