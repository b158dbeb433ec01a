from __future__ import annotations

import pytest
from comfyui_ferry.core.errors import RequestError
from comfyui_ferry.core.workers.cluster.placement import NoRoomError, choose_nodes


def node(name: str, gpus: int, free: int | None = None, here: bool = False) -> dict:
    free = gpus if free is None else free
    return {
        "id": name, "address": name, "here": here, "gpus": gpus, "free_gpus": free, "cpus": 8, "free_cpus": 8
    }  # fmt: skip


def chosen(nodes: list[dict], count: int, on_gpu: bool = True) -> list[tuple[str, list[int]]]:
    return [(share.node, list(share.ranks)) for share in choose_nodes(nodes, count, on_gpu=on_gpu)]


@pytest.mark.parametrize(
    ("nodes", "count", "expected"),
    [
        ([node("a", 4), node("b", 4, here=True)], 4, [("b", [0, 1, 2, 3])]),
        ([node("a", 8), node("b", 2, here=True)], 4, [("a", [0, 1, 2, 3])]),
        ([node("a", 2), node("b", 2, here=True)], 3, [("b", [0, 1]), ("a", [2])]),
        ([node("a", 2, free=1), node("b", 2, here=True)], 3, [("b", [0, 1]), ("a", [2])]),
        ([node("a", 0), node("b", 1), node("c", 1)], 2, [("b", [0]), ("c", [1])]),
    ],
)
def test_the_fewest_nodes_with_room(nodes, count, expected):
    assert chosen(nodes, count) == expected


def test_cpu_ranks_take_cpus():
    assert chosen([node("a", 0)], 2, on_gpu=False) == [("a", [0, 1])]


def test_too_few_gpus_say_what_there_is():
    with pytest.raises(
        RequestError, match=r"gpus=5 was asked.*2 nodes have 4 GPUs.*a: 1 of 2 free"
    ) as caught:
        choose_nodes([node("a", 2, free=1), node("b", 2)], 5, on_gpu=True)
    assert isinstance(caught.value, NoRoomError) and caught.value.for_ever
    with pytest.raises(NoRoomError, match="of which 3 are free") as caught:
        choose_nodes([node("a", 2, free=1), node("b", 2)], 4, on_gpu=True)
    assert not caught.value.for_ever
