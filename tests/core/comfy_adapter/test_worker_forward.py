"""A worker's forward as it is, recorded and compiled: the same output, also after weights changed."""

from __future__ import annotations

import functools
import gc
import weakref
from typing import Any

import pytest
import torch
import torch._dynamo  # once, instead of in every rank
from comfyui_ferry.core.comfy_adapter.acceleration import Acceleration
from comfyui_ferry.core.parallel import CompiledBlocks, RankLayout, RecordedForward, SequenceGroup
from ferry_support.parity import TOLERANCE, relative_error, world_group
from ferry_support.ranks import run_ranks
from ferry_support.recorder import Recorder
from ferry_support.sampling import with_lora
from ferry_support.tiny_models import noise, qwen_call
from ferry_support.tiny_patchers import PATCHERS

pytestmark = [pytest.mark.comfy, pytest.mark.timeout(120)]


def _rank(description: dict, weights: dict, message: dict) -> dict[str, Any]:
    from comfyui_ferry.core.comfy_adapter import worker_forward
    from comfyui_ferry.core.comfy_adapter.worker_model import WorkerModel

    recorder = Recorder()
    worker_forward.RecordedForward = functools.partial(RecordedForward, record=recorder)
    worker_forward.CompiledBlocks = functools.partial(CompiledBlocks, backend="eager")
    group = world_group()
    layout = RankLayout(0, SequenceGroup(group, ring=None, ulysses=group))
    worker = WorkerModel(description, weights, device=torch.device("cpu"), layout=layout)

    def outputs(worker: WorkerModel) -> list[torch.Tensor]:
        calls = [qwen_call(x=noise(1, 16, 1, 10, 14, seed=step), transformer_options={}) for step in range(3)]
        # A recording's output is overwritten by the next call; from a GPU it has been copied by then.
        return [worker.forward(call).clone() for call in calls]

    def with_and_without_lora(worker: WorkerModel) -> list[torch.Tensor]:
        seen = outputs(worker)
        worker.apply_patches(message)
        seen += outputs(worker)
        worker.apply_patches({})
        return seen

    seen = []
    for acceleration in (Acceleration.NONE, Acceleration.GRAPHS, Acceleration.COMPILE, Acceleration.NONE):
        worker.evaluate.set_acceleration(acceleration)
        seen.append((outputs if acceleration.compiles else with_and_without_lora)(worker))
    worker.evaluate.set_acceleration(Acceleration.GRAPHS)
    outputs(worker)
    recorded = weakref.ref(worker.evaluate._recorded)
    gc.disable()
    del worker
    return {"seen": seen, "recordings": recorder.num_recordings, "freed": recorded() is None}


def test_accelerated_is_the_same_and_follows_a_lora() -> None:
    from comfyui_ferry.core.comfy_adapter.model_export import describe_model, named_tensors
    from comfyui_ferry.core.comfy_adapter.patch_messages import encode_patches

    model = with_lora(PATCHERS["qwen"].build())
    weights = {name: tensor.detach() for name, tensor in named_tensors(model.model.diffusion_model).items()}
    arguments = (describe_model(model.model), weights, encode_patches(model.patches))
    for result in run_ranks(_rank, 2, *arguments):
        plain, recorded, compiled, again = result["seen"]
        assert relative_error(plain[3], plain[0]) > 1e-3  # the LoRA
        for expected, *others in zip(plain, recorded, again, strict=True):
            assert all(torch.equal(expected, other) for other in others)
        assert max(map(relative_error, compiled, plain)) <= TOLERANCE
        # Once for each set of weights.
        assert result["recordings"] == 3
        # With the last reference: before a worker ends its process group.
        assert result["freed"]
