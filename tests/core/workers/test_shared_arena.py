from __future__ import annotations

import pytest
import torch
from comfyui_ferry.core.errors import RequestError
from comfyui_ferry.core.workers import SharedArena, open_arena
from ferry_support.worker_specs import grown, open_files


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "linear.weight": torch.randn(33, 7, generator=generator),
        "half": torch.randn(5, generator=generator).bfloat16(),
        "eight": torch.randn(9, generator=generator).to(torch.float8_e4m3fn),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "transposed": torch.randn(4, 6, generator=generator).mT,
    }


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    as_bytes = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (left, right)]
    return left.shape == right.shape and left.dtype == right.dtype and torch.equal(*as_bytes)


def test_an_arena_holds_the_tensors_and_opens_without_a_copy():
    source = weights()
    arena = SharedArena.create(source)
    opened = open_arena(arena.handle())
    assert opened.keys() == source.keys()
    for name, tensor in source.items():
        assert same(opened[name], tensor), name
        assert opened[name].data_ptr() % 64 == 0
    arena.tensors["scalar"].fill_(4)
    assert opened["scalar"] == 4


def test_tied_weights_are_stored_once_and_lie_on_each_other():
    shared = torch.nn.Parameter(torch.randn(1000))
    arena = SharedArena.create({"a": shared, "b": shared, "c": shared.detach(), "d": shared.detach().clone()})
    tensors = open_arena(arena.handle())
    assert tensors["a"].data_ptr() == tensors["b"].data_ptr() == tensors["c"].data_ptr()
    assert tensors["a"].data_ptr() != tensors["d"].data_ptr()
    assert arena.size_bytes < 3 * shared.nbytes


def test_views_of_one_storage_that_differ_are_stored_apart():
    base = torch.arange(10.0)
    tensors = open_arena(SharedArena.create({"a": base[:5], "b": base[5:], "c": base[:5].flip(0)}).handle())
    assert tensors["a"].tolist() == [0, 1, 2, 3, 4]
    assert tensors["b"].tolist() == [5, 6, 7, 8, 9]


def test_reserve_needs_no_data_and_is_filled_one_by_one():
    source = weights()
    arena = SharedArena.reserve({name: torch.empty_like(t, device="meta") for name, t in source.items()})
    opened = open_arena(arena.handle())
    for name, tensor in source.items():
        arena.write(name, tensor)
    assert all(same(opened[name], tensor) for name, tensor in source.items())


def test_add_appends_and_keeps_what_was_opened():
    arena = SharedArena.create({"a": torch.ones(3)})
    before = open_arena(arena.handle())
    arena.add({"b": torch.full((5000,), 2.0), "c": torch.full((2,), 3.0)})
    after = open_arena(arena.handle())
    arena.write("a", torch.full((3,), 7.0))
    assert before["a"].tolist() == after["a"].tolist() == [7, 7, 7]
    assert after["b"].sum() == 10_000
    assert after["c"].tolist() == [3, 3]


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("a", torch.ones(4), r"holds torch.float32 \[3\]"),
        ("a", torch.ones(3, dtype=torch.float16), r"holds torch.float32 \[3\]"),
        ("z", torch.ones(3), "no such tensor"),
    ],
)
def test_a_write_that_does_not_fit_is_refused(name, tensor, message):
    with pytest.raises(RequestError, match=message):
        SharedArena.create({"a": torch.ones(3)}).write(name, tensor)


class Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize("tensor", [torch.eye(2).to_sparse(), torch.ones(2).as_subclass(Subclass)])
def test_what_is_not_a_plain_tensor_is_refused(tensor):
    with pytest.raises(RequestError, match="sharing 'a'"):
        SharedArena.create({"a": tensor})


def test_a_name_is_used_once():
    arena = SharedArena.create({"a": torch.ones(3)})
    with pytest.raises(RequestError, match="already holds"):
        arena.add({"a": torch.ones(3)})


def test_a_closed_arena_has_no_handle_but_its_tensors_live():
    before = {"files": len(open_files())}
    arena = SharedArena.create({"a": torch.ones(3)})
    opened = open_arena(arena.handle())
    arena.close()
    arena.close()
    assert opened["a"].tolist() == [1, 1, 1]
    with pytest.raises(RequestError, match="closed"):
        arena.handle()
    del opened
    assert grown(lambda: {"files": len(open_files())}, before) == {}


def test_made_in_inference_mode_it_serves_autograd():
    with torch.inference_mode():
        arena = SharedArena.create({"a": torch.ones(3)})
        arena.write("a", torch.full((3,), 2.0))
    arena.write("a", torch.ones(3, requires_grad=True))
    assert not arena.tensors["a"].is_inference()


def test_two_workers_share_the_parents_pages(pool):
    size = 32 << 20
    arena = SharedArena.create({"big": torch.ones(size, dtype=torch.uint8), "w": torch.zeros(4)})
    assert pool.call("open", {"arena": arena.handle()}) == {0: ["big", "w"], 1: ["big", "w"]}
    arena.write("w", torch.arange(4.0))
    assert all(w.tolist() == [0, 1, 2, 3] for w in pool.call("read", {"name": "w"}).values())

    pool.call("read", {"name": "big"})  # touches every page in both workers
    for rank, counted in pool.call("arena_bytes").items():
        assert counted["Rss"] >= size, rank
        # Each page is in three processes: a worker's proportional share is a third, no page is its own.
        assert counted["Pss"] <= 0.4 * size, rank
        assert counted["Anonymous"] == 0, rank
    arena.close()
