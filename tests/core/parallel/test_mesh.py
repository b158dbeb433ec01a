from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from comfyui_ferry.core.errors import RequestError
from comfyui_ferry.core.parallel import ParallelDims, build_mesh
from ferry_support.ranks import run_ranks


def test_world_size_is_the_product_of_all_degrees() -> None:
    assert ParallelDims().world_size == 1
    assert ParallelDims(cfg=2, tp=3, ring=5, ulysses=7).world_size == 210


@pytest.mark.parametrize(
    ("dims", "num_gpus", "parts"),
    [
        (ParallelDims(ulysses=2), 0, ["gpus=0"]),
        (ParallelDims(ulysses=2), -1, ["gpus=-1"]),
        (ParallelDims(ulysses=0), 2, ["ulysses_degree=0", "from 1 to 2"]),
        (ParallelDims(cfg=-3), 2, ["cfg_degree=-3"]),
        (ParallelDims(ring=0), 2, ["ring_degree=0", "from 1 to 2"]),
        (ParallelDims(tp=0), 2, ["tensor_parallel_degree=0", "from 1 to 2"]),
        (
            ParallelDims(cfg=2, ulysses=2),
            3,
            ["3 GPUs", "cfg 2 x batch 1 x tp 1 x ring 1 x ulysses 2 = 4", "Set gpus to 4"],
        ),
        (ParallelDims(), 2, ["2 GPUs", "= 1"]),
    ],
)
def test_degrees_that_do_not_fit_name_the_numbers(
    dims: ParallelDims, num_gpus: int, parts: list[str]
) -> None:
    with pytest.raises(RequestError) as caught:
        dims.validate(num_gpus=num_gpus)
    for part in parts:
        assert part in str(caught.value)


def test_fitting_degrees_pass() -> None:
    ParallelDims(cfg=2, ulysses=3).validate(num_gpus=6)
    ParallelDims(cfg=2, ring=2, ulysses=3).validate(num_gpus=12)
    ParallelDims().validate(num_gpus=1)


def _layout(dims: ParallelDims) -> tuple[int, list[int] | None, float | None]:
    layout = build_mesh(dims)
    if layout.sequence_group is None:
        return layout.cfg_branch, None, None
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total, group=layout.sequence_group.whole)
    return layout.cfg_branch, dist.get_process_group_ranks(layout.sequence_group.whole), total.item()


def _sequence_ranks(dims: ParallelDims) -> list[list[int] | None]:
    """Return the global ranks of this rank's whole sequence group, its ring and its Ulysses group."""
    group = build_mesh(dims).sequence_group
    assert group is not None
    groups = (group.whole, group.ring, group.ulysses)
    return [None if one is None else dist.get_process_group_ranks(one) for one in groups]


def test_cfg_is_the_outermost_axis_and_sequence_groups_are_neighbours() -> None:
    seen = run_ranks(_layout, 4, ParallelDims(cfg=2, ulysses=2))
    assert seen == [(0, [0, 1], 1.0), (0, [0, 1], 1.0), (1, [2, 3], 5.0), (1, [2, 3], 5.0)]


def test_ulysses_groups_are_neighbours_within_a_ring() -> None:
    seen = run_ranks(_sequence_ranks, 8, ParallelDims(cfg=2, ring=2, ulysses=2))
    whole = [[0, 1, 2, 3]] * 4 + [[4, 5, 6, 7]] * 4
    ring = [[0, 2], [1, 3], [0, 2], [1, 3], [4, 6], [5, 7], [4, 6], [5, 7]]
    ulysses = [[0, 1], [0, 1], [2, 3], [2, 3], [4, 5], [4, 5], [6, 7], [6, 7]]
    assert seen == [list(ranks) for ranks in zip(whole, ring, ulysses, strict=True)]


def test_a_degree_of_one_has_no_group() -> None:
    assert run_ranks(_sequence_ranks, 2, ParallelDims(ring=2)) == [[[0, 1], [0, 1], None]] * 2
    assert run_ranks(_sequence_ranks, 2, ParallelDims(ulysses=2)) == [[[0, 1], None, [0, 1]]] * 2


def test_a_rank_alone_with_its_sequence_has_no_group() -> None:
    assert run_ranks(_layout, 2, ParallelDims(cfg=2)) == [(0, None, None), (1, None, None)]


def test_mesh_refuses_degrees_that_do_not_fit_the_ranks() -> None:
    with pytest.raises(AssertionError, match="RequestError"):
        run_ranks(_layout, 2, ParallelDims(ulysses=3))


def _tensor_ranks(dims: ParallelDims) -> tuple[list[int] | None, list[int] | None, bool]:
    layout = build_mesh(dims)
    sequence = layout.sequence_group and layout.sequence_group.whole
    groups = [group and dist.get_process_group_ranks(group) for group in (layout.tensor_group, sequence)]
    return groups[0], groups[1], layout.speaks


def test_ranks_that_share_weights_hold_the_same_part_of_the_sequence() -> None:
    """One rank of each conditioning branch sends the output back."""
    seen = run_ranks(_tensor_ranks, 8, ParallelDims(cfg=2, tp=2, ulysses=2))
    tensor = [[0, 2], [1, 3], [0, 2], [1, 3], [4, 6], [5, 7], [4, 6], [5, 7]]
    sequence = [[0, 1], [0, 1], [2, 3], [2, 3], [4, 5], [4, 5], [6, 7], [6, 7]]
    speaks = [rank in (0, 4) for rank in range(8)]
    assert seen == list(zip(tensor, sequence, speaks, strict=True))
    assert run_ranks(_tensor_ranks, 2, ParallelDims(tp=2)) == [([0, 1], None, True), ([0, 1], None, False)]
