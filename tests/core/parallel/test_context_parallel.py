"""The operators, and a plain PyTorch model that runs in parallel by its plan without ComfyUI."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from comfyui_ferry.core.errors import PlanError
from comfyui_ferry.core.parallel import parallelize
from comfyui_ferry.core.parallel.context_parallel import gather, localize
from comfyui_ferry.core.parallel.forward_state import ForwardState
from comfyui_ferry.core.parallel.plan import (
    Absent,
    ExpandRowsThenShard,
    ExpandThenShard,
    Gather,
    InputAction,
    Local,
    LocalIndex,
    LocalRanges,
    LocalSlices,
    ModelPlan,
    ModuleRule,
    ParallelMethod,
    Replicated,
    Shard,
    Split,
    Truncate,
)
from ferry_support.parity import TOLERANCE, relative_error, world_group, world_sequence
from ferry_support.ranks import run_ranks
from ferry_support.tiny_models import noise
from ferry_support.toy_model import IMAGE, PLAN, TEXT, WIDTH, build_toy, toy_call
from torch import nn

TOTAL = TEXT + IMAGE
CALLS = {
    "plain": toy_call(),
    "batch 1": toy_call(batch=1),
    "two text tokens": toy_call(text=2),
    "key mask": toy_call(mask=noise(2, 1, TOTAL) > 0),
    "full mask": toy_call(mask=noise(TOTAL, TOTAL)),
    "mask for each head": toy_call(mask=noise(2, 3, TOTAL, TOTAL)),
    "one row for each frame": toy_call(frames=noise(2, 4, WIDTH)),
    "cut and slices": toy_call(cut=6, rows=[(0, 3, 2.0), (3, 11, 0.5), (11, IMAGE, 3.0)]),
    "residuals": toy_call(control={"blocks": [noise(2, 13, WIDTH), noise(2, IMAGE, WIDTH)]}),
}


def _errors(names: list[str]) -> dict[str, float]:
    model = build_toy()
    handle = parallelize(model, PLAN, group=world_group())
    errors = {}
    for name in names:
        with torch.no_grad():
            expected = expand_frames(model, CALLS[name])
            options = {"override": handle.attention_override}
            errors[name] = relative_error(
                handle.run(model, **CALLS[name], transformer_options=options), expected
            )
    return errors


def expand_frames(model: torch.nn.Module, call: dict[str, Any]) -> torch.Tensor:
    """Return one rank's output; the toy itself wants one row for each token."""
    frames = call["frames"]
    if frames.shape[1] > 1:
        run = -(-IMAGE // frames.shape[1])
        frames = frames.repeat_interleave(run, 1)[:, :IMAGE]
    return model(**call | {"frames": frames})


@pytest.mark.parametrize("world_size", [2, 3, 6])
def test_a_plain_model_equals_one_rank(world_size: int) -> None:
    for errors in run_ranks(_errors, world_size, list(CALLS)):
        assert errors.keys() == CALLS.keys()
        # fp32: the same sums in another order.
        assert max(errors.values()) <= TOLERANCE, errors


def on_ranks(world_size: int, action: InputAction, value: Any, lengths: dict[str, int]) -> list[Any]:
    """Return what each rank gets from ``action`` with these streams open."""

    def body() -> Any:
        state = ForwardState(world_sequence())
        for name, length in lengths.items():
            state.open(name, length)
        try:
            local = localize(action, value, state)
        except PlanError as error:
            return str(error)
        return local.tolist() if isinstance(local, torch.Tensor) else local

    return run_ranks(body, world_size)


ROWS = torch.arange(5.0)[None]


@pytest.mark.parametrize(
    ("action", "value", "lengths", "expected"),
    [
        (Split("x", "i"), ROWS, {}, [[[0.0, 1.0, 2.0]], [[3.0, 4.0]]]),
        (Split("x", "i"), ROWS[:, :1], {}, [[[0.0]], [[0.0]]]),
        (Shard("x", ("t", "i")), ROWS, {"t": 3, "i": 2}, [[[0.0, 1.0, 3.0]], [[2.0, 4.0]]]),
        (Replicated("x"), ROWS, {}, [ROWS.tolist()] * 2),
        (ExpandThenShard("x", "i"), ROWS[:, 3:4], {"i": 7}, [[[3.0]]] * 2),
        (ExpandThenShard("x", "i"), ROWS[:, :2], {"i": 6}, [[[0.0, 0.0, 0.0]], [[1.0, 1.0, 1.0]]]),
        (ExpandThenShard("x", "i"), ROWS[:, :3], {"i": 8}, [[[0.0, 0.0, 0.0, 1.0]], [[1.0, 1.0, 2.0, 2.0]]]),
        (LocalIndex("x", "i"), 0, {"i": 5}, [0, 0]),
        (LocalIndex("x", "i"), 2, {"i": 5}, [2, 0]),
        (LocalIndex("x", "i"), 4, {"i": 5}, [3, 1]),
        (LocalIndex("x", "i"), 5, {"i": 5}, [3, 2]),
        (
            LocalSlices("x", "i"), [(0, 4, "a"), (4, 5, "b")], {"i": 5},
            [[(0, 3, "a")], [(0, 1, "a"), (1, 2, "b")]],
        ),
        (
            LocalSlices("x", "i"), [(0, 4, "a"), (4, None, "b")], {"i": 5},
            [[(0, 3, "a")], [(0, 1, "a"), (1, 2, "b")]],
        ),
        (LocalRanges("x", "i"), [(0, 2), (3, 5)], {"i": 5}, [[(0, 2)], [(0, 2)]]),
        (LocalRanges("x", "i"), [(2, 4), (5, 5)], {"i": 5}, [[(2, 3)], [(0, 1)]]),
        (Truncate("x", ("i",)), ROWS[:, :4], {"i": 5}, [[[0.0, 1.0, 2.0]], [[0.0, 1.0]]]),
        # As a model makes them that adds its own text length, 2 on each rank, to global positions.
        (
            LocalSlices("x", "i", after="t"),
            [(0, 6, "a"), (6, 7, "b")],
            {"t": 4, "i": 5},
            [[(0, 5, "a")], [(0, 3, "a"), (3, 4, "b")]],
        ),
        (
            LocalSlices("x", "i", after="t"), [(0, 3, "a"), (3, 4, "b")], {"t": 4, "i": 2},
            [[(0, 3, "a")], [(0, 2, "a"), (2, 3, "b")]],
        ),
    ],
)  # fmt: skip
def test_operators(action: InputAction, value: Any, lengths: dict[str, int], expected: list[Any]) -> None:
    assert on_ranks(2, action, value, lengths) == expected


@pytest.mark.parametrize(
    ("action", "value", "message"),
    [
        (Shard("x", ("i",)), ROWS[:, :4], "whole length, 5"),
        (Shard("x", ("i",)), (ROWS,), "expects a tensor, got tuple"),
        (Shard("x", ("t",)), ROWS, "outside their region"),
        (Local("x", ("i",)), ROWS, "this rank's length, 3"),
        (ExpandThenShard("x", "i"), ROWS[:, :3], "3 rows cannot be spread over the 5 tokens"),
        (LocalIndex("x", "i"), 6, "6 is no index into the 5 tokens"),
        (LocalIndex("x", "i"), ROWS, "is no index"),
        (LocalSlices("x", "i"), [(0, 6, 1)], "slice 0:6 is not in the 5 tokens"),
        (LocalRanges("x", "i"), [(1, 2), (4, 6)], "[(4, 6)] are not in the 5 tokens"),
        (Truncate("x", ("i",)), ROWS[:, :2], "2 tokens are fewer than this rank's 3"),
        (Absent("x"), ROWS, "not supported in parallel"),
    ],
)
def test_values_that_do_not_fit_are_refused(action: InputAction, value: Any, message: str) -> None:
    assert message in on_ranks(2, action, value, {"i": 5})[0]


def test_gather_joins_in_canonical_order_and_closes_the_region() -> None:
    whole = noise(2, 7, 3)

    def body() -> torch.Tensor:
        state = ForwardState(world_sequence())
        for name, length in (("a", 2), ("b", 5), ("c", 1)):
            state.open(name, length)
        local = localize(Shard("x", ("a", "b")), whole, state)
        joined = gather(Gather(("a", "b"), discard=("c",)), local, state)
        state.check_closed()
        assert joined.is_contiguous()
        return joined

    for joined in run_ranks(body, 3):
        assert torch.equal(joined, whole)


class FrameRows:
    """An object that holds one row for each frame."""

    __slots__ = ("count", "rows", "run")

    def __init__(self, rows: torch.Tensor, run: int) -> None:
        self.rows, self.run, self.count = rows, run, rows.shape[1]


@pytest.mark.parametrize(("num_rows", "run"), [(3, 2), (6, 1), (1, 6), (1, 1)])
def test_rows_held_by_an_object(num_rows: int, run: int) -> None:
    held = FrameRows(torch.arange(float(num_rows)).view(1, -1, 1), run)
    action = ExpandRowsThenShard("x", "i", rows="rows", run_length="run", num_rows="count")

    def body() -> list[float]:
        state = ForwardState(world_sequence())
        state.open("i", 6)
        local = localize(action, held, state)
        assert localize(action, held, state) is local
        assert (local.run, local.count) == (1, local.rows.shape[1])
        assert (held.run, held.count) == (run, num_rows)
        return local.rows.flatten().tolist()

    whole = torch.arange(float(num_rows)).repeat_interleave(run).tolist()
    expected = [[0.0], [0.0]] if num_rows == 1 else [whole[:3], whole[3:]]
    assert run_ranks(body, 2) == expected


class PairBlock(nn.Module):
    def forward(self, pair: tuple) -> tuple:
        return tuple(2 * value for value in pair)


class PairModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads, self.block = 1, PairBlock()

    def forward(self, *pair: torch.Tensor) -> tuple:
        return self.block(pair)


def pair_plan(*inputs: InputAction) -> ModelPlan:
    rule = ModuleRule("block", inputs=inputs, gather=Gather(("i",), item=0))
    path = f"{PairModel.__module__}.PairModel"
    return ModelPlan("Pair", path, heads="heads", rules=(rule,), methods=frozenset(ParallelMethod))


def test_items_of_a_tuple_are_cut_and_gathered_apart() -> None:
    def body() -> list[list[float]]:
        model = PairModel()
        handle = parallelize(
            model, pair_plan(Split("pair[0]", "i"), Replicated("pair[1]")), group=world_group()
        )
        return [value.flatten().tolist() for value in handle.run(model, ROWS, ROWS[:, :2])]

    expected = [(2 * ROWS).flatten().tolist(), [0.0, 2.0]]
    assert run_ranks(body, 2) == [expected, expected]


def test_an_item_that_the_plan_does_not_name_is_refused() -> None:
    def body() -> None:
        model = PairModel()
        handle = parallelize(model, pair_plan(Split("pair[0]", "i")), group=world_group())
        with pytest.raises(PlanError, match=r"called with \['pair\[1\]'\], which the plan does not name"):
            handle.run(model, ROWS, ROWS)

    run_ranks(body, 1)


def test_errors_name_the_module_and_the_argument() -> None:
    def body() -> None:
        model = build_toy()
        handle = parallelize(model, PLAN, group=world_group())
        options = {"override": handle.attention_override}
        call = toy_call() | {"position": noise(1, TOTAL - 1, WIDTH)}
        with (
            torch.no_grad(),
            pytest.raises(
                PlanError, match=r"blocks.0, argument 'position'.*text \(5 tokens\) \+ image \(17 tokens\)"
            ),
        ):
            handle.run(model, **call, transformer_options=options)
        dist.barrier()

    run_ranks(body, 2)
