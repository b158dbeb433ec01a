"""Training on several devices: real processes, the same curve as one device, nothing lost when one fails."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from comfyui_ferry.core.errors import RequestError, WorkerError
from ferry_support.tiny_patchers import PATCHERS

pytestmark = [pytest.mark.comfy, pytest.mark.timeout(300)]

# The same kernels on the same values; what differs is the order of additions in fp32 (loss: target of the
# output in place of the clean picture). 6e-8 of the loss and 7e-7 of the LoRA are seen.
SAME_LOSS = 1e-6
SAME_LORA = 1e-5


def train(kind="qwen", model=None, *, steps=4, gpus=1, training=None, offload=None, lora=None, **saves):
    from comfyui_ferry.core.comfy_adapter.train_lora import SaveSettings, TrainingRequest, run_lora_training
    from comfyui_ferry.core.training import LoraConfig, OffloadSettings, TrainingConfig

    tiny = PATCHERS[kind]
    config = {"learning_rate": 1e-3, "accumulation_steps": 4} | (training or {})
    request = TrainingRequest(
        LoraConfig(**({"rank": 2, "alpha": 2.0} | (lora or {}))),
        TrainingConfig(steps=steps, **config),
        OffloadSettings(**(offload or {})),
        SaveSettings(**({"prefix": ""} | saves)),
        save_dtype="fp32",
        gpus=gpus,
    )
    captions = [tiny.caption(seed, tokens) for seed, tokens in enumerate((7, 9, 7))]
    with torch.inference_mode():
        return run_lora_training(model or tiny.build(), [tiny.latent(0, 3)], captions, request)


def difference(first, second):
    assert first.lora.keys() == second.lora.keys()
    pairs = [(first.lora[name], value) for name, value in second.lora.items()]
    return max(float((a - b).norm() / b.norm().clamp_min(1e-12)) for a, b in pairs)


def check_same(one, many):
    assert many.steps == one.steps
    for here, there in zip(one.loss_map["loss"], many.loss_map["loss"], strict=True):
        assert abs(here - there) <= SAME_LOSS * here
    assert difference(many, one) <= SAME_LORA


@pytest.mark.parametrize(
    ("kind", "gpus", "options"),
    [
        ("qwen", 2, {"training": {"batch_size": 2, "max_gradient_norm": 1.0}}),
        ("flux", 3, {"training": {"accumulation_steps": 3}, "lora": {"algorithm": "DoRA"}}),
        ("wan", 2, {"offload": {"optimizer_on_cpu": True}, "training": {"accumulation_steps": 2}}),
    ],
)
def test_many_devices_learn_what_one_does(kind, gpus, options):
    check_same(train(kind, steps=3, **options), train(kind, steps=3, gpus=gpus, **options))


def test_one_copy_of_the_weights(monkeypatch):
    from comfyui_ferry.core.comfy_adapter import training_helpers as module

    shared = []
    original = module.TrainingHelpers.finish

    def finish(helpers):
        share = original(helpers)
        for rank in helpers.pool._group.ranks:
            maps = open(f"/proc/{rank.process.pid}/smaps").read().split("\n")
            at = next(i for i, line in enumerate(maps) if "ferry-masters" in line)
            values = {line.split()[0]: line.split()[1] for line in maps[at + 1 : at + 22]}
            shared.append((int(values["Private_Dirty:"]), int(values["Private_Clean:"])))
        return share

    monkeypatch.setattr(module.TrainingHelpers, "finish", finish)
    train(gpus=3, steps=1, training={"accumulation_steps": 3})
    assert shared and all(dirty == 0 for dirty, _ in shared)


def test_a_lost_helper_ends_the_training_and_keeps_what_was_learned(output, monkeypatch):
    from comfyui_ferry.core.comfy_adapter import training_helpers as module

    seen = []
    original = module.TrainingHelpers.start

    def start(helpers, *arguments):
        seen.append(helpers)
        if len(seen) == 3:
            os.kill(helpers.pool._group.ranks[0].process.pid, signal.SIGKILL)
        return original(helpers, *arguments)

    monkeypatch.setattr(module.TrainingHelpers, "start", start)
    model = PATCHERS["qwen"].build()
    before = {name: value.clone() for name, value in model.model.state_dict().items()}
    with pytest.raises(WorkerError) as caught:
        train(model=model, gpus=2, prefix="lost")
    assert any("saved as of step 2" in note for note in caught.value.__notes__)
    assert not seen[0].pool.alive
    assert all(torch.equal(before[name], value) for name, value in model.model.state_dict().items())
    monkeypatch.setattr(module.TrainingHelpers, "start", original)
    # Any number of devices may go on with it.
    check_same(train(), train(model=model, gpus=1, prefix="lost", resume_from="latest"))


def test_a_cancel_ends_the_helpers(output, monkeypatch):
    import comfy.model_management
    from comfyui_ferry.core.comfy_adapter import training_helpers as module

    pools = []
    original = module.TrainingHelpers.finish

    def finish(helpers):
        pools.append(helpers.pool)
        if len(pools) == 2:
            comfy.model_management.interrupt_current_processing()
        return original(helpers)

    monkeypatch.setattr(module.TrainingHelpers, "finish", finish)
    with pytest.raises(comfy.model_management.InterruptProcessingException):
        train(gpus=2, prefix="cancelled")
    assert not pools[0].alive
    assert len(list(output.glob("cancelled_*.safetensors"))) == 1


def test_a_nan_of_a_helper_skips_the_step(monkeypatch):
    """A loss that is not finite there counts as one here, with the layer's name."""
    from comfyui_ferry.core.comfy_adapter import recorded_calls, training_helpers
    from comfyui_ferry.core.comfy_adapter.training_session import TrainingSession

    lines, calls = [], []
    original = recorded_calls.micro_step_calls

    def broken(*arguments, **options):
        found = original(*arguments, **options)
        calls.append(found)
        if len(calls) == 4:  # one of the second step; the first is tried before the start
            found[0]["args"][0].fill_(float("nan"))
        return found

    monkeypatch.setattr(training_helpers, "micro_step_calls", broken)
    monkeypatch.setattr(TrainingSession, "after_skip", lambda session, what: lines.append(what))
    result = train(gpus=2, steps=2)
    assert result.steps == 2
    assert len(lines) == 1 and "the loss of step 2 of 2" in lines[0] and "the input of" in lines[0]


def test_what_cannot_be_shared_is_refused_before_a_process_starts(monkeypatch):
    from comfyui_ferry.core.comfy_adapter import training_helpers as module

    monkeypatch.setattr(module.WorkerPool, "start", lambda *_, **__: pytest.fail("a process was started"))
    patched = PATCHERS["qwen"].build()
    patched.set_model_attn1_patch(lambda *arguments: arguments)
    for options, named in [
        ({"gpus": 3}, "grad_accumulation_steps to 6"),
        ({"gpus": 0}, "gpus=0"),
        ({"gpus": 2, "offload": {"enabled": False}}, "offload off"),
        ({"gpus": 64, "training": {"accumulation_steps": 64}}, "gpus=64"),
        ({"gpus": 2, "model": patched}, "uses patches"),
    ]:
        with pytest.raises(RequestError, match=named):
            train(**options)
