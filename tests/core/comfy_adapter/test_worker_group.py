"""What a group remembers of its workers, over prompts that differ or were cancelled; the workers are none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from comfyui_ferry.core.comfy_adapter.acceleration import Acceleration
from comfyui_ferry.core.comfy_adapter.worker_group import WorkerGroup
from comfyui_ferry.core.comfy_adapter.worker_parts import WorkerPart
from comfyui_ferry.core.comfy_adapter.worker_room import ModelNeeds, StreamRequest
from comfyui_ferry.core.errors import RequestError, WorkerError
from comfyui_ferry.core.parallel import ParallelDims
from torch import nn

pytestmark = pytest.mark.comfy

FREE_BYTES = 1000


class Cancelled(BaseException):
    pass


class Engine:
    """Takes every call as two workers would that have no model yet."""

    alive = True
    device_names = ("cuda:0", "cuda:1")

    def __init__(self) -> None:
        self.jobs: list[str] = []
        self.held_bytes = 0
        self.cancels = False

    def send_ahead(self, payload: Any, *, poll: Any) -> None:
        pass

    def submit(self, job: str, payload: Any, *, same_work: bool = False) -> Any:
        results = self.call(job, payload)
        return SimpleNamespace(wait=lambda poll: results)

    def call(
        self, job: str, payload: Any = None, *, poll: Any = None, same_work: bool = False
    ) -> dict[int, Any]:
        self.jobs.append(job)
        if self.cancels:
            raise Cancelled
        result: Any = None
        if job == "free_memory":
            result = FREE_BYTES - self.held_bytes
        elif job == "patch":
            result = []
        elif job == "load":
            stream = payload["stream"]
            self.held_bytes = 600 if stream is None else stream["room_bytes"]
            result = None if stream is None else stream["room_bytes"]
        elif job == "unload":
            self.held_bytes = 0
        return dict.fromkeys((0, 1), result)


def new_group() -> tuple[WorkerGroup, Engine]:
    engine: Any = Engine()
    return WorkerGroup(("cuda:0", "cuda:1"), engine), engine


def load(group: WorkerGroup, *, compute: int = 100, limit: int | None = None, depth: int = 1) -> None:
    part = WorkerPart(
        nn.Identity(), nn.Identity(), "denoiser", ParallelDims(ulysses=2), describe=dict, num_bytes=600
    )
    weights: Any = SimpleNamespace(handles=list)
    group.load(1, part, weights, ModelNeeds(600, 50, compute, StreamRequest(limit, depth)))


def patch(group: WorkerGroup, version: str, acceleration: Acceleration = Acceleration.NONE) -> None:
    group.patch(1, {}, version, force_cast=False, acceleration=acceleration)


def test_weights_of_a_cancelled_prompt_are_not_taken_for_those_before():
    group, engine = new_group()
    load(group)
    patch(group, "one")
    engine.cancels = True
    with pytest.raises(Cancelled):
        patch(group, "another")  # the workers apply it all the same
    engine.cancels = False
    engine.jobs.clear()
    patch(group, "one")
    patch(group, "one")
    assert engine.jobs == ["patch"]


def test_ranks_that_applied_other_weights_end_the_prompt_and_are_asked_again(monkeypatch):
    group, engine = new_group()
    load(group)
    call = engine.call
    monkeypatch.setattr(engine, "call", lambda job, *a, **k: call(job, *a, **k) | {1: ["another"]})
    for _ in range(2):
        with pytest.raises(WorkerError, match=r"ranks applied different weight patches: .*1: \['another'\]"):
            patch(group, "one")
    assert engine.jobs.count("patch") == 2


def test_what_was_loaded_whole_streams_once_it_must():
    group, engine = new_group()
    load(group)
    load(group, compute=50)
    assert engine.jobs == ["free_memory", "load"] and not group.loaded[1].streams
    for _ in range(2):
        load(group, compute=300)  # a larger picture, for which there is room beside the weights
    assert engine.jobs[2:] == ["free_memory"]
    load(group, compute=500)
    assert engine.jobs[3:] == ["free_memory", "unload", "free_memory", "load"]
    assert group.loaded[1].streams and engine.held_bytes == 500
    group, engine = new_group()
    load(group)
    load(group, limit=400)  # a VRAM budget
    assert group.loaded[1].streams and engine.held_bytes == 400
    engine.jobs.clear()
    load(group, limit=400, depth=2)
    assert engine.jobs[0] == "unload" and group.loaded[1].streams


def test_a_picture_that_no_streaming_makes_possible_is_refused():
    group, _ = new_group()
    load(group)
    with pytest.raises(RequestError, match="Raise tensor_parallel_degree"):
        load(group, compute=990)


def test_a_module_that_the_workers_do_not_hold_is_not_called():
    group, engine = new_group()
    with pytest.raises(RequestError, match="Queue the prompt again"):
        group.call(1, {})
    assert not engine.jobs


def test_streamed_weights_refuse_compiling_before_the_workers_see_it():
    group, engine = new_group()
    load(group, limit=400)
    engine.jobs.clear()
    with pytest.raises(RequestError, match="stream through the workers' VRAM"):
        patch(group, "one", Acceleration.COMPILE)
    assert not engine.jobs
    patch(group, "one", Acceleration.AUTO)
    assert engine.jobs == ["patch"]
