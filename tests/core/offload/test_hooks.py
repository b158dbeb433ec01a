from __future__ import annotations

from dataclasses import dataclass

import torch
from comfyui_ferry.core.module_hooks import hook_names
from comfyui_ferry.core.offload import OffloadTrainingManager
from comfyui_ferry.core.offload.hooks import HOOK_NAME, TaskEnd, tensors_in
from ferry_support.offload_cases import Residual, Stack
from torch import nn


@dataclass
class Output:
    sample: torch.Tensor
    extra: dict


def test_tensors_in_any_output():
    a, b, c, d = (torch.ones(1) * i for i in range(4))
    value = (a, [b], Output(c, {"x": d, "y": "text"}), None, 3, Output)
    assert [id(t) for t in tensors_in(value)] == [id(t) for t in (a, b, c, d)]


def test_only_modules_that_lead_to_tensors_are_hooked():
    model = Stack(Residual(), nn.Sequential(nn.ReLU()), nn.ReLU())
    with OffloadTrainingManager(model, "cpu"):
        hooked = [path for path, module in model.named_modules() if hook_names(module) == [HOOK_NAME]]
        assert hooked == ["", "blocks.0", "blocks.0.norm", "blocks.0.up", "blocks.0.down"]
    assert not any(hook_names(module) for module in model.modules())


class Recorder:
    def __init__(self) -> None:
        self.ended: list[int] = []

    def end_task(self, task_id: int) -> None:
        self.ended.append(task_id)


def test_the_end_of_a_task_is_reported_once_however_it_comes():
    engine = Recorder()
    called, dropped, orphan = TaskEnd(engine, 1), TaskEnd(engine, 2), TaskEnd(Recorder(), 3)
    called()
    del called, dropped, orphan
    assert engine.ended == [1, 2]
