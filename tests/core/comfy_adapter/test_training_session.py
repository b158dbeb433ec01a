"""Resume, stop, cancel and failure of whole trainings: nothing is lost, nothing is different."""

from __future__ import annotations

import dataclasses
import types

import pytest
import torch
from comfyui_ferry.core.errors import RequestError, SaveError
from comfyui_ferry.core.training import OPTIMIZERS
from ferry_support.tiny_patchers import PATCHERS

pytestmark = [pytest.mark.comfy, pytest.mark.timeout(300)]

WAN = PATCHERS["wan"]


def train(model=None, *, steps=6, latents=None, rank=2, training=None, offload=None, **saves):
    from comfyui_ferry.core.comfy_adapter.train_lora import SaveSettings, TrainingRequest, run_lora_training
    from comfyui_ferry.core.training import LoraConfig, OffloadSettings, TrainingConfig

    config = {"learning_rate": 1e-2, "warmup_steps": 2, "ema_decay": 0.9, "max_gradient_norm": 1.0}
    request = TrainingRequest(
        LoraConfig(rank=rank, alpha=2.0),
        TrainingConfig(steps=steps, **(config | (training or {}))),
        OffloadSettings(**(offload or {})),
        SaveSettings(**({"prefix": "tiny"} | saves)),
        save_dtype="fp32",
    )
    with torch.inference_mode():
        return run_lora_training(
            model or WAN.build(), latents or [WAN.latent(0, 2)], [WAN.caption(0), WAN.caption(1)], request
        )


def files(output):
    return sorted(path.relative_to(output).as_posix() for path in output.rglob("*") if path.is_file())


@pytest.fixture(scope="module")
def whole():
    """Six steps in one go, with the weights and the optimizer on the host."""
    return train(prefix="", offload={"optimizer_on_cpu": True})


def test_three_steps_and_three_more_are_six(output, whole):
    offload = {"optimizer_on_cpu": True}
    first = train(steps=3, offload=offload, every=1)
    assert first.steps == 3
    assert files(output) == [
        "tiny_00001_.safetensors",
        "training_states/tiny_00001/step_00000002.safetensors",
        "training_states/tiny_00001/step_00000003.safetensors",
    ]
    before = version()
    second = train(offload=offload, resume_from="latest")
    assert second.steps == 6
    assert second.loss_map == whole.loss_map
    assert all(torch.equal(second.lora[name], value) for name, value in whole.lora.items())
    # Its own last state does not make ComfyUI run the same prompt again; another training's does.
    assert version() == before
    train(steps=1, training={"warmup_steps": 0})
    assert version() != before


def version():
    from comfyui_ferry.nodes.training import TrainLoraOffload

    return TrainLoraOffload.fingerprint_inputs(resume_from=["latest"], save_prefix=["tiny"])


def test_another_training_is_refused_by_name(output):
    train(steps=1, training={"warmup_steps": 0})
    other = WAN.build()
    with torch.inference_mode():
        other.model.diffusion_model.head.head.weight.mul_(1.5)
    for changes, named in [
        ({"rank": 4}, "rank was 2 and is 4"),
        ({"latents": [WAN.latent(5, 2)]}, "dataset was 2 latents"),
        ({"training": {"optimizer": "Adafactor"}}, "optimizer was AdamW"),
        ({"model": other}, "base model was"),
    ]:
        with pytest.raises(RequestError, match=named):
            train(resume_from="latest", **changes)
    assert len(files(output)) == 2


def test_what_no_model_could_mend_is_refused_before_the_model_is_touched(output, monkeypatch):
    import comfy.model_management as management

    plain = {"warmup_steps": 0, "ema_decay": 0.0}
    train(steps=1, training=plain)
    monkeypatch.setattr(management, "unload_all_models", lambda: pytest.fail("training started"))
    monkeypatch.setitem(OPTIMIZERS, "Adam", dataclasses.replace(OPTIMIZERS["Adam"], needs_gpu=True))
    for changes, named in [
        ({"steps": 1, "training": plain}, "Raise steps above 1"),
        ({"training": {"ema_decay": 0.5}}, "without averages"),
        ({"training": {"optimizer": "Adam"}}, "on GPUs only"),
    ]:
        with pytest.raises(RequestError, match=named):
            train(resume_from="latest", **changes)
    assert len(files(output)) == 2


def at_step(monkeypatch, step, action):
    """Run ``action`` after an optimizer step, as another thread might."""
    from comfyui_ferry.core.comfy_adapter.training_session import TrainingSession

    original = TrainingSession.after_step

    def after_step(self, done, loss):
        if done == step:
            action(self)
        original(self, done, loss)

    monkeypatch.setattr(TrainingSession, "after_step", after_step)


def test_stop_returns_what_there_is_and_save_writes_it_at_once(output, monkeypatch):
    seen = []

    def ask(session):
        session.running.ask("save")
        session.running.ask("stop")
        seen.append(session)

    at_step(monkeypatch, 2, ask)
    result = train()
    assert result.steps == 2
    assert len(result.loss_map["loss"]) == 2
    assert seen[0].progress.saved == "tiny_00001_.safetensors"
    assert seen[0].progress.saved_step == 2
    assert files(output) == [
        "tiny_00001_.safetensors",  # asked for
        "tiny_00002_.safetensors",  # the result
        "training_states/tiny_00001/step_00000002.safetensors",
    ]
    monkeypatch.undo()


def test_a_step_that_runs_out_of_memory_once_is_repeated(output, monkeypatch, whole):
    from comfyui_ferry.core.comfy_adapter.training import ComfyProcess

    original, tries, said = ComfyProcess.denoise, [], []

    def denoise(*arguments):
        tries.append(0)
        if len(tries) in (1, 4):  # the proof before the first step, and the first step
            raise torch.OutOfMemoryError("no memory")
        return original(*arguments)

    monkeypatch.setattr(ComfyProcess, "denoise", denoise)
    at_step(monkeypatch, 3, lambda session: session.running.ask("save"))
    at_step(monkeypatch, 4, lambda session: said.append(session.progress.message))
    result = train(prefix="", offload={"optimizer_on_cpu": True})
    assert len(tries) == 10 and said == ["not saved: save_prefix is empty"]
    assert result.loss_map == whole.loss_map
    assert all(torch.equal(result.lora[name], value) for name, value in whole.lora.items())


@pytest.mark.parametrize("kind", ["cancel", "error", "error in the optimizer"])
def test_a_training_that_breaks_off_is_saved_and_can_be_gone_on_with(output, monkeypatch, kind, whole):
    import comfy.model_management as management
    import comfy.utils

    offload = {"optimizer_on_cpu": True}

    def break_off(session):
        if kind == "cancel":
            management.interrupt_current_processing(True)
        elif kind == "error in the optimizer":
            session.save(lora=False)  # what is gone back to
            optimizer = session.training.weights.optimizer
            step = optimizer.step

            def half_a_step():
                step()
                raise ArithmeticError("broken")

            optimizer.step = half_a_step
        else:
            original = management.throw_exception_if_processing_interrupted

            def fail():
                monkeypatch.setattr(management, "throw_exception_if_processing_interrupted", original)
                raise ArithmeticError("broken")

            monkeypatch.setattr(management, "throw_exception_if_processing_interrupted", fail)

    with monkeypatch.context() as patch:
        at_step(patch, 4, break_off)
        expected = management.InterruptProcessingException if kind == "cancel" else ArithmeticError
        with pytest.raises(expected) as caught:
            train(offload=offload)
        assert "saved as of step 4" in caught.value.__notes__[0]
    assert files(output) == [
        "tiny_00001_.safetensors",
        "training_states/tiny_00001/step_00000004.safetensors",
    ]
    _, header = comfy.utils.load_torch_file(str(output / "tiny_00001_.safetensors"), return_metadata=True)
    assert (header["steps"], header["rank"], header["alpha"]) == ("4", "2", "2.0")
    assert len(header["dataset_hash"]) == len(header["base_hash"]) == 32
    second = train(offload=offload, resume_from="tiny_00001/step_00000004.safetensors")
    assert second.loss_map == whole.loss_map
    assert all(torch.equal(second.lora[name], value) for name, value in whole.lora.items())


@pytest.mark.parametrize("unsaved", [SaveError("no disk"), torch.OutOfMemoryError("no memory")])
def test_an_error_while_saving_does_not_hide_the_one_before(unsaved):
    from comfyui_ferry.core.comfy_adapter.training_session import TrainingSession

    def save(*, lora):
        raise unsaved

    training = types.SimpleNamespace(step=3, weights=types.SimpleNamespace(is_whole=True))
    session = types.SimpleNamespace(
        start=None, manager=None, request=types.SimpleNamespace(saves=types.SimpleNamespace(prefix="x")),
        progress=types.SimpleNamespace(saved="a state"), _running_training=lambda: training, save=save,
    )  # fmt: skip
    error = ArithmeticError("broken")
    TrainingSession._keep(session, error)
    assert f"a state is the last: {unsaved}" in error.__notes__[0]


def test_a_disk_that_is_full_for_a_while_does_not_end_it(output, monkeypatch):
    seen = []
    (output / "training_states").write_text("in the way")
    at_step(monkeypatch, 2, lambda session: seen.append(session.progress.message))
    at_step(monkeypatch, 3, lambda session: (output / "training_states").unlink())
    result = train(steps=4, every=1)
    assert result.steps == 4
    assert "not saved: no folder for training states" in seen[0]
    assert files(output)[1:] == [
        "training_states/tiny_00001/step_00000003.safetensors",
        "training_states/tiny_00001/step_00000004.safetensors",
    ]


def test_a_budget_is_planned_shown_and_kept(monkeypatch, whole):
    """On the CPU too: two passes are rehearsed, the plan is there before the first step, nothing differs."""
    from comfyui_ferry.core.comfy_adapter.training_session import TrainingSession

    seen = []
    original = TrainingSession.after_step

    def after_step(session, step, loss):
        if step == 1:
            seen.append(session.progress)
        original(session, step, loss)
        seen.append(session.progress)
        seen.append(session.manager.stats().resident_set_bytes)

    monkeypatch.setattr(TrainingSession, "after_step", after_step)
    offload = {"optimizer_on_cpu": True, "vram_budget_gb": 0.0006, "ram_budget_gb": 1.0}
    result = train(prefix="", offload=offload)
    assert result.loss_map == whole.loss_map
    assert all(torch.equal(result.lora[name], value) for name, value in whole.lora.items())
    before, kept_bytes = seen[0], [value for value in seen if isinstance(value, int)]
    assert before.step == 0 and "s a step" in before.plan and before.predicted_seconds > 0
    assert max(kept_bytes) <= 0.0006e9
    assert 0 < before.gpu_planned_bytes <= 0.0006e9
    assert 0 <= seen[-2].stalled_share <= 1


@pytest.mark.parametrize(
    ("offload", "named"),
    [
        ({"vram_budget_gb": 1e-6}, "device memory"),
        ({"ram_budget_gb": 1e-6}, "ram_gb=1e-06"),
        ({"vram_budget_gb": -1.0}, "vram_budget_gb=-1.0"),
        ({"vram_budget_gb": 1.0, "enabled": False}, "offload off"),
    ],
)
def test_a_budget_that_cannot_be_kept_is_refused(output, offload, named):
    with pytest.raises(RequestError, match=named):
        train(offload=offload)
    assert files(output) == []
