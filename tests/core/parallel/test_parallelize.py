from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from comfyui_ferry.core.errors import PlanError
from comfyui_ferry.core.module_hooks import hook_names
from comfyui_ferry.core.parallel import ParallelHandle, parallelize
from ferry_support.parity import TOLERANCE, relative_error, world_group
from ferry_support.ranks import run_ranks
from ferry_support.toy_model import PLAN, ToyModel, build_toy, toy_call

Body = Callable[[ToyModel, ParallelHandle], None]


def on_ranks(body: Body, world_size: int = 2) -> None:
    """Run ``body(model, handle)`` on every rank, without gradients."""

    def rank() -> None:
        model = build_toy()
        with torch.no_grad():
            body(model, parallelize(model, PLAN, group=world_group()))

    run_ranks(rank, world_size)


def call_of(handle: ParallelHandle) -> dict:
    return toy_call() | {"transformer_options": {"override": handle.attention_override}}


def test_remove_leaves_nothing_behind() -> None:
    def body(model: ToyModel, handle: ParallelHandle) -> None:
        handle.run(model, **call_of(handle))
        handle.remove()
        handle.remove()
        assert all(not hook_names(module) for module in model.modules())
        assert all("forward" not in module.__dict__ for module in model.modules())
        assert torch.equal(model(**toy_call()), build_toy()(**toy_call()))

    on_ranks(body)


def test_outside_of_run_the_model_computes_alone() -> None:
    def body(model: ToyModel, handle: ParallelHandle) -> None:
        assert torch.equal(model(**call_of(handle)), build_toy()(**toy_call()))

    on_ranks(body)


def test_positional_arguments() -> None:
    def body(model: ToyModel, handle: ParallelHandle) -> None:
        call = call_of(handle)
        options = call.pop("transformer_options")
        output = handle.run(model, *call.values(), transformer_options=options)
        # fp32: the same sums in another order.
        assert relative_error(output, build_toy()(**toy_call())) <= TOLERANCE

    on_ranks(body)


def test_without_the_override_it_raises_instead_of_attending_locally() -> None:
    def body(model: ToyModel, handle: ParallelHandle) -> None:
        with pytest.raises(PlanError, match=r"blocks.0.joint made 0 attention calls"):
            handle.run(model, **toy_call())

    on_ranks(body)


def test_after_an_interrupt_the_next_run_is_clean() -> None:
    class Interrupt(BaseException):
        pass

    def body(model: ToyModel, handle: ParallelHandle) -> None:
        def interrupted(*args, **kwargs):
            raise Interrupt

        options = {"override": interrupted}
        with pytest.raises(Interrupt):
            handle.run(model, **toy_call(), transformer_options=options)
        assert handle.current() is None
        output = handle.run(model, **call_of(handle))
        assert relative_error(output, build_toy()(**toy_call())) <= TOLERANCE

    on_ranks(body)


def test_a_second_plan_on_the_same_model_is_refused() -> None:
    def body(model: ToyModel, handle: ParallelHandle) -> None:
        with pytest.raises(PlanError, match="is parallel already"):
            parallelize(model, PLAN, group=world_group())
        handle.remove()
        parallelize(model, PLAN, group=world_group())

    on_ranks(body, world_size=1)


def test_a_call_inside_a_call_is_refused() -> None:
    def body(model: ToyModel, handle: ParallelHandle) -> None:
        def nested(**kwargs):
            return handle.run(model, **kwargs)

        with pytest.raises(PlanError, match="called again before"):
            handle.run(nested, **call_of(handle))

    on_ranks(body, world_size=1)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"patches": {"double_block": [print]}}, "double_block"),
        ({"patches": {"post_input": [print], "attn1_patch": [print]}}, "'attn1_patch', 'post_input'"),
        ({"patches_replace": {"dit": {("double_block", 0): print}}}, "patches_replace dit"),
    ],
)
def test_block_patches_are_refused_by_name(options: dict, name: str) -> None:
    def body(model: ToyModel, handle: ParallelHandle) -> None:
        with pytest.raises(PlanError, match=name):
            handle.run(model, **toy_call(), transformer_options=options)
        handle.run(model, **call_of(handle))

    on_ranks(body, world_size=1)


def test_empty_patches_are_no_patches() -> None:
    def body(model: ToyModel, handle: ParallelHandle) -> None:
        call = call_of(handle)
        call["transformer_options"] |= {"patches": {"double_block": []}, "patches_replace": {"dit": {}}}
        handle.run(model, **call)

    on_ranks(body, world_size=1)
