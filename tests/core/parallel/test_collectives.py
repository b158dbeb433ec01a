from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from comfyui_ferry.core.parallel.collectives import all_gather, all_to_all
from ferry_support.parity import world_group
from ferry_support.ranks import run_ranks

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.float8_e4m3fn]


def _exchange(matrix: list[list[int]], dtype: torch.dtype) -> list[float]:
    """Rank i sends matrix[i][j] copies of the value 4 * i + j to rank j."""
    rank = dist.get_rank()
    sent = [torch.full((count,), 4 * rank + target) for target, count in enumerate(matrix[rank])]
    receive = [row[rank] for row in matrix]
    received = all_to_all(torch.cat(sent).to(dtype), matrix[rank], receive_sizes=receive, group=world_group())
    assert received.dtype == dtype
    return received.float().tolist()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_to_all_uneven_and_empty_parts(dtype: torch.dtype) -> None:
    matrix = [[1, 3, 0], [0, 2, 0], [2, 0, 0]]
    for rank, received in enumerate(run_ranks(_exchange, 3, matrix, dtype)):
        expected = [4 * source + rank for source in range(3) for _ in range(matrix[source][rank])]
        assert received == [float(torch.tensor(value).to(dtype)) for value in expected]


def _join(sizes: list[int], dtype: torch.dtype) -> list[list[float]]:
    rank = dist.get_rank()
    rows = torch.full((sizes[rank], 2), rank + 1).to(dtype)
    return all_gather(rows, sizes, group=world_group()).float().tolist()


@pytest.mark.parametrize("sizes", [[2, 2, 2], [3, 1, 0], [0, 0, 1]])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_gather(sizes: list[int], dtype: torch.dtype) -> None:
    expected = [
        [float(torch.tensor(rank + 1).to(dtype))] * 2 for rank in range(3) for _ in range(sizes[rank])
    ]
    assert run_ranks(_join, 3, sizes, dtype) == [expected] * 3


def _join_with_gradients() -> None:
    all_gather(torch.ones(1, requires_grad=True), [1, 1], group=world_group())


def test_gradients_are_refused_instead_of_lost() -> None:
    with pytest.raises(AssertionError, match="no backward"):
        run_ranks(_join_with_gradients, 2)
