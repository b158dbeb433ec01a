from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from comfyui_ferry.core.errors import PlanError
from comfyui_ferry.core.parallel.forward_state import ForwardState
from comfyui_ferry.core.parallel.plan import ControlResiduals, LocalAttention, SelfAttention
from ferry_support.parity import world_sequence
from ferry_support.ranks import run_ranks
from ferry_support.tiny_models import noise
from ferry_support.toy_model import attention


def on_one_rank(body: Callable[[ForwardState], None]) -> None:
    run_ranks(lambda: body(ForwardState(world_sequence())), 1)


def test_streams_open_once_and_close() -> None:
    def body(state: ForwardState) -> None:
        state.open("image", 5)
        with pytest.raises(PlanError, match="opened twice"):
            state.open("image", 5)
        with pytest.raises(PlanError, match=r"\['text'\] are used outside their region"):
            state.streams(("image", "text"))
        with pytest.raises(PlanError, match=r"\['image'\] still sharded"):
            state.check_closed()
        state.close(("image",))
        state.check_closed()
        state.open("image", 7)

    on_one_rank(body)


def test_a_table_is_sharded_once_for_all_blocks() -> None:
    def body(state: ForwardState) -> None:
        table, calls = torch.zeros(3), []

        def shard() -> torch.Tensor:
            calls.append(1)
            return table.clone()

        first = state.shard_once(("image", 1), table, shard)
        assert state.shard_once(("image", 1), table, shard) is first
        assert state.shard_once(("image", 2), table, shard) is not first
        assert state.shard_once(("image", 1), table.clone(), shard) is not first
        assert len(calls) == 3

    on_one_rank(body)


def test_self_attention_must_come_through_exactly_once() -> None:
    q = noise(1, 5, 12)

    def body(state: ForwardState) -> None:
        state.open("image", 5)
        role = SelfAttention(("image",))
        with (
            pytest.raises(PlanError, match=r"blocks.3 made 0 attention calls"),
            state.attention_roles((role,), "blocks.3"),
        ):
            pass
        with (
            pytest.raises(PlanError, match=r"blocks.3 made 2 attention calls"),
            state.attention_roles((role,), "blocks.3"),
        ):
            for _ in range(2):
                state.attend(attention, (q, q, q), 3, (), {})
        with state.attention_roles((LocalAttention(),), "blocks.3"):
            pass

    on_one_rank(body)


def test_an_option_that_skips_the_attention() -> None:
    q, role = noise(1, 5, 12), SelfAttention(("image",), unless_option="skip")

    def body(state: ForwardState) -> None:
        state.open("image", 5)
        with state.attention_roles((role,), "blocks.3", {"skip": True}):
            pass
        with (
            pytest.raises(PlanError, match="although an option says that it makes none"),
            state.attention_roles((role,), "blocks.3", {"skip": True}),
        ):
            state.attend(attention, (q, q, q), 3, (), {})
        with (
            pytest.raises(PlanError, match=r"made 0 attention calls .* expected 1"),
            state.attention_roles((role,), "blocks.3", {"skip": False}),
        ):
            pass

    on_one_rank(body)


def test_several_calls_take_their_roles_in_order() -> None:
    q = noise(1, 5, 12)
    roles = (SelfAttention(("text", "image")), SelfAttention(("image",)))

    def body(state: ForwardState) -> None:
        state.open("text", 2)
        state.open("image", 3)
        with state.attention_roles(roles, "blocks.0"):
            state.attend(attention, (q, q, q), 3, (), {})
            image = q[:, 2:]
            output = state.attend(attention, (image, image, image), 3, (), {})
        assert torch.allclose(output, attention(image, image, image, 3), atol=1e-6)
        with (
            pytest.raises(PlanError, match=r"made 1 attention calls .* expected 2"),
            state.attention_roles(roles, "blocks.0"),
        ):
            state.attend(attention, (q, q, q), 3, (), {})

    on_one_rank(body)


def test_attention_without_a_role() -> None:
    q = noise(1, 5, 12)

    def body(state: ForwardState) -> None:
        assert torch.equal(state.attend(attention, (q, q, q), 3, (), {}), attention(q, q, q, 3))
        state.open("image", 5)
        with pytest.raises(PlanError, match="no role in the plan"):
            state.attend(attention, (q, q, q), 3, (), {})

    on_one_rank(body)


def test_an_error_inside_a_role_is_not_hidden() -> None:
    def body(state: ForwardState) -> None:
        state.open("image", 5)
        with (
            pytest.raises(KeyboardInterrupt),
            state.attention_roles((SelfAttention(("image",)),), "blocks.0"),
        ):
            raise KeyboardInterrupt

    on_one_rank(body)


def test_residuals_are_cut_when_their_stream_opens() -> None:
    def body() -> list:
        state = ForwardState(world_sequence())
        residual = torch.arange(4.0).view(1, 4, 1)
        control = {"input": [residual, None], "other": [residual]}
        private = state.defer_control(ControlResiduals("control", ("input",), "image"), control)
        assert private["input"][0] is residual
        state.open("text", 3)
        assert private["input"][0] is residual
        state.open("image", 7)
        assert control["input"][0] is residual
        assert private["input"][1] is None
        assert private["other"][0] is residual
        return private["input"][0].flatten().tolist()

    # 7 tokens on 3 ranks are 3 + 2 + 2; the residual covers the first 4 of them.
    assert run_ranks(body, 3) == [[0.0, 1.0, 2.0], [3.0], []]


def test_residuals_for_the_whole_stream_are_cut_with_their_phantom() -> None:
    def body() -> list:
        state = ForwardState(world_sequence())
        control = {"input": [torch.arange(1.0, 3.0).view(1, 2, 1)]}
        private = state.defer_control(ControlResiduals("control", ("input",), "image", whole=True), control)
        state.open("image", 2)
        return private["input"][0].flatten().tolist()

    assert run_ranks(body, 3) == [[1.0], [2.0], [0.0]]


def test_residuals_that_run_into_the_stream_behind_are_zeros_there() -> None:
    """As many rows as the model's slice by the whole length takes there: never one, to be broadcast."""

    def body() -> list:
        state = ForwardState(world_sequence())
        control = {key: [torch.arange(1.0, 5.0).view(1, 4, 1)] for key in ("input", "output")}
        residuals = ControlResiduals(
            "control", ("input", "output"), "image", whole=True, run_into=("output", "text")
        )
        private = state.defer_control(residuals, control)
        state.open("text", 5)
        state.open("image", 4)
        assert private["input"][0].shape[1] == 2 - (state.rank > 0)
        return private["output"][0].flatten().tolist()

    assert run_ranks(body, 3) == [[1.0, 2.0, 0.0, 0.0], [3.0, 0.0, 0.0], [4.0, 0.0]]


def test_residuals_for_the_whole_stream_must_be_as_long() -> None:
    def body(state: ForwardState) -> None:
        residuals = ControlResiduals("control", ("input",), "image", whole=True)
        state.defer_control(residuals, {"input": [torch.zeros(1, 6, 1)]})
        with pytest.raises(PlanError, match="whole length, 7"):
            state.open("image", 7)

    on_one_rank(body)


def test_a_residual_longer_than_its_stream_is_refused() -> None:
    def body(state: ForwardState) -> None:
        state.defer_control(
            ControlResiduals("control", ("input",), "image"), {"input": [torch.zeros(1, 8, 1)]}
        )
        with pytest.raises(PlanError, match="has 8 tokens, but image has 7"):
            state.open("image", 7)

    on_one_rank(body)
