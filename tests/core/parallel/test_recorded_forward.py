from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from comfyui_ferry.core.errors import PlanError, RequestError
from comfyui_ferry.core.parallel import RecordedForward, parallelize, recorded_forward
from comfyui_ferry.core.parallel.recorded_forward import _MAX_RECORDINGS
from ferry_support.parity import world_group
from ferry_support.ranks import run_ranks
from ferry_support.recorder import Recorder
from ferry_support.tiny_models import noise
from ferry_support.toy_model import PLAN, build_toy, toy_call


def scaled(arguments: dict[str, Any]) -> torch.Tensor:
    return arguments["x"] * arguments["options"]["factor"] + arguments["options"]["more"][0]


def call_with(x: torch.Tensor, factor: float = 2.0, more: float = 1.0) -> dict[str, Any]:
    return {"x": x, "options": {"factor": factor, "more": [torch.tensor(more)]}}


def test_a_shape_is_recorded_at_its_second_call_and_then_replayed() -> None:
    recorder = Recorder()
    forward = RecordedForward(scaled, record=recorder)
    for step in range(4):
        arguments = call_with(noise(2, 3, seed=step), more=float(step))
        assert torch.equal(forward(arguments), scaled(arguments))
        assert recorder.num_recordings == (step > 0)


def test_what_is_no_tensor_belongs_to_the_shape() -> None:
    recorder = Recorder()
    forward = RecordedForward(scaled, record=recorder)
    x = noise(2, 3)
    for arguments in (call_with(x), call_with(x, factor=3.0), call_with(x.double()), call_with(x.t())):
        for _ in range(2):
            assert torch.equal(forward(arguments), scaled(arguments))
    assert recorder.num_recordings == 4
    changing = RecordedForward(scaled, record=recorder)
    for step in range(100):
        changing(call_with(x, factor=float(step)))
    assert recorder.num_recordings == 4


def test_inputs_are_the_callers() -> None:
    forward = RecordedForward(scaled, record=Recorder())
    x = noise(2, 3)
    for _ in range(3):
        forward(call_with(x))
    x.zero_()
    assert torch.equal(forward(call_with(noise(2, 3))), scaled(call_with(noise(2, 3))))
    assert not x.any()


def test_cleared_and_bounded() -> None:
    recorder = Recorder()
    forward = RecordedForward(scaled, record=recorder)
    shapes = [noise(1, size) for size in range(1, _MAX_RECORDINGS + 3)]
    for x in shapes:
        forward(call_with(x))
        forward(call_with(x))
    assert len(forward._recordings) == _MAX_RECORDINGS
    forward.clear()
    forward(call_with(shapes[-1]))
    assert recorder.num_recordings == len(shapes)
    forward(call_with(shapes[-1]))
    assert recorder.num_recordings == len(shapes) + 1


def test_what_cannot_be_recorded_is_refused() -> None:
    def failing(error: Exception) -> RecordedForward:
        def record(call: Any) -> Any:
            raise error

        return RecordedForward(scaled, record=record)

    for error, expected in (
        (RuntimeError("operation not permitted when stream is capturing"), RequestError),
        (PlanError("no plan"), PlanError),
        (torch.OutOfMemoryError("full"), torch.OutOfMemoryError),
    ):
        forward = failing(error)
        forward(call_with(noise(2)))
        with pytest.raises(expected, match=str(error)):
            forward(call_with(noise(2)))


@pytest.mark.parametrize("wrong_replay", [1, 2])
def test_a_recording_that_gives_something_else_is_not_used(wrong_replay: int) -> None:
    """Such as one that reads memory which others use by then."""

    def record(call: Any) -> Any:
        output, replays = call(), []

        def replay() -> None:
            replays.append(None)
            output.copy_(call() if len(replays) < wrong_replay else torch.full_like(output, 7.0))

        return replay, output

    refusing = RecordedForward(scaled, record=record)
    passing = RecordedForward(scaled, record=record, required=False)
    x = noise(2, 3)
    refusing(call_with(x))
    with pytest.raises(RequestError, match="its replay differs from the forward itself"):
        refusing(call_with(x))
    for _ in range(3):
        assert torch.equal(passing(call_with(x)), scaled(call_with(x)))


def test_what_need_not_be_recorded_runs_as_it_is() -> None:
    attempts = []

    def record(call: Any) -> Any:
        attempts.append(call)
        raise torch.OutOfMemoryError("full")

    forward = RecordedForward(scaled, record=record, required=False)
    for step in range(4):
        arguments = call_with(noise(2, 3, seed=step))
        assert torch.equal(forward(arguments), scaled(arguments))
    assert len(attempts) == 1


def _outputs_where_one_rank_fails(failing: int, place: str) -> list[bool]:
    model, group = build_toy(), world_group()
    handle = parallelize(model, PLAN, group=group)
    compared = []

    def forward(arguments: dict[str, Any]) -> Any:
        options = {"override": handle.attention_override}
        return handle.run(model, **arguments, transformer_options=options)

    def fail() -> None:
        if torch.distributed.get_rank() == failing:
            raise torch.OutOfMemoryError("full")  # another process of that GPU took the memory

    def record(call: Any) -> Any:
        recorded = Recorder()(call)
        if place == "recording":
            fail()
        return recorded

    def compare(actual: torch.Tensor, expected: torch.Tensor) -> float:
        compared.append(actual)
        if place == f"replay {len(compared)}":
            fail()
        return 0.0

    recorded_forward._relative_error = compare
    agree = functools.partial(handle.agree, device=torch.device("cpu"))
    recorded = RecordedForward(forward, record=record, required=False, agree=agree)
    with torch.inference_mode():
        inputs = [toy_call() | {"image": toy_call()["image"] * (step + 1)} for step in range(4)]
        return [torch.equal(recorded(each), forward(each)) for each in inputs]


@pytest.mark.parametrize(("failing", "place"), [(1, "recording"), (0, "replay 1"), (1, "replay 2"), (2, "")])
def test_ranks_record_together_or_not_at_all(failing: int, place: str) -> None:
    """Else one makes other exchanges than the rest, and they wait for each other."""
    assert run_ranks(_outputs_where_one_rank_fails, 2, failing, place, timeout_s=30) == [[True] * 4] * 2


def test_a_rank_that_fails_amid_the_forward_itself_does_not_ask_the_others() -> None:
    """They are amid the same forward and would take the question for one of its exchanges."""
    calls, said = [], []

    def forward(arguments: dict[str, Any]) -> torch.Tensor:
        calls.append(arguments)
        if len(calls) == 3:  # as it is, then recorded, then beside the recording
            raise torch.OutOfMemoryError("full")
        return arguments["x"] * 2

    def agree(well: bool) -> bool:
        said.append(well)
        return well

    together = RecordedForward(forward, record=Recorder(), required=False, agree=agree)
    together({"x": noise(2)})
    with pytest.raises(torch.OutOfMemoryError):
        together({"x": noise(2)})
    assert said == [True]
    calls.clear()
    alone = RecordedForward(forward, record=Recorder(), required=False)
    for step in range(4):
        assert torch.equal(alone({"x": noise(2, seed=step)}), noise(2, seed=step) * 2)


def _parallel_outputs() -> list[bool]:
    model = build_toy()
    handle = parallelize(model, PLAN, group=world_group())

    def forward(arguments: dict[str, Any]) -> Any:
        options = {"override": handle.attention_override}
        return handle.run(model, **arguments, transformer_options=options)

    recorded = RecordedForward(forward, record=Recorder())
    same = []
    with torch.inference_mode():
        for step in range(3):
            inputs = toy_call() | {"image": toy_call()["image"] * (step + 1)}
            same.append(torch.equal(recorded(inputs), forward(inputs)))
    return same


def test_a_parallel_forward_is_recorded_as_a_whole() -> None:
    assert run_ranks(_parallel_outputs, 2) == [[True] * 3] * 2


@pytest.mark.gpu
def test_a_cuda_graph_gives_the_same_bits() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64)).cuda()
    forward = RecordedForward(lambda arguments: model(arguments["x"]))
    with torch.inference_mode():
        for x in noise(4, 8, 64).cuda():
            assert torch.equal(forward({"x": x}), model(x))
        x = noise(8, 64).cuda()
        reading = RecordedForward(lambda arguments: model(arguments["x"]) * arguments["x"].sum().item())
        reading({"x": x})
        with pytest.raises(RequestError, match="forward of this model cannot be recorded"):
            reading({"x": x})


@pytest.mark.gpu
def test_after_a_recording_that_fails_all_is_as_before() -> None:
    """A tensor is made on the host within the forward, as Wan does."""
    stream, x = torch.cuda.current_stream(), noise(8, 64).cuda()

    def reads_the_host(arguments: dict[str, Any]) -> torch.Tensor:
        return arguments["x"] * torch.arange(64).to(arguments["x"])

    refusing = RecordedForward(reads_the_host, name="Wan")
    passing = RecordedForward(reads_the_host, name="Wan", required=False)
    expected = x * torch.arange(64, device="cuda")
    with torch.inference_mode():
        assert torch.equal(refusing({"x": x}), expected)
        with pytest.raises(RequestError, match=r"forward of Wan.*copy between CPU and CUDA"):
            refusing({"x": x})
        for _ in range(3):
            assert torch.equal(passing({"x": x}), expected)
    assert torch.cuda.current_stream() == stream and not torch.cuda.is_current_stream_capturing()
    for _ in range(3):
        working = RecordedForward(lambda arguments: arguments["x"] * 2)
        for _ in range(3):
            assert torch.equal(working({"x": x}), x * 2)
        assert len(working._recordings) == 1
