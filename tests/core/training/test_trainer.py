"""The loop on a toy flow: it learns, repeats exactly, and stops when it should."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import math

import pytest
import torch
from comfyui_ferry.core.errors import RequestError, TrainingError
from comfyui_ferry.core.training import (
    Callbacks,
    LoraAdapters,
    LoraConfig,
    RectifiedFlow,
    Sample,
    Share,
    Training,
    TrainingConfig,
    read_state,
    save_state,
    select_targets,
    train,
)
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


class Velocity(nn.Module):
    """Predicts the velocity of an eight-dimensional point; the condition is a vector that is added."""

    def __init__(self):
        super().__init__()
        self.time = nn.Linear(1, 8)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.requires_grad_(False)

    def forward(self, noisy, t, conditions):
        x = noisy + self.time(t.view(-1, 1)) + torch.stack(list(conditions))
        for block in self.blocks:
            x = block(x)
        return x


def build():
    torch.manual_seed(0)
    return Velocity()


def samples(count=4):
    random = torch.Generator().manual_seed(3)
    return [
        Sample(torch.randn(1, 8, generator=random), torch.randn(8, generator=random)) for _ in range(count)
    ]


def run(model=None, *, data=None, callbacks=None, **changes):
    model = model or build()
    config = TrainingConfig(**({"steps": 5, "learning_rate": 1e-2} | changes))
    adapters = LoraAdapters(
        select_targets(model), LoraConfig(rank=8, alpha=8.0), seed=config.seed, device="cpu"
    )
    with adapters:
        losses = train(
            RectifiedFlow(model), data or samples(), adapters, config, device="cpu", callbacks=callbacks
        )
    return losses, adapters.state_dict(prefix="", dtype=torch.float32)


def same(first, second):
    return all(torch.equal(first[name], second[name]) for name in first)


def test_the_loss_falls():
    losses, _ = run(data=samples(1), steps=300, batch_size=8)
    # 0.27 is seen; what is left is the noise that the toy cannot tell from the sample.
    assert sum(losses[-20:]) < 0.4 * sum(losses[:20])


def test_a_seed_repeats_exactly_whatever_the_global_generator():
    torch.manual_seed(1)
    first = run()
    torch.rand(10)
    second = run()
    assert first[0] == second[0]
    assert same(first[1], second[1])
    other = run(seed=1)
    assert other[0] != first[0]


def test_the_global_generator_and_the_base_model_are_untouched():
    model = build()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    run(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_accumulation_averages_as_a_batch_does():
    # The noise of a micro-step differs from that of a batch, so take data on which it has no part.
    class Fixed(RectifiedFlow):
        def add_noise(self, clean, noise, sigma):
            return clean

        def sigmas(self, positions):
            return torch.full_like(positions, 0.5)

        def denoise(self, noisy, sigma, conditions):
            return self.velocity(noisy, sigma, conditions)

    def train_fixed(**changes):
        model = build()
        config = TrainingConfig(steps=1, learning_rate=1e-2, optimizer="SGD", **changes)
        adapters = LoraAdapters(select_targets(model), LoraConfig(rank=8, alpha=8.0), seed=0, device="cpu")
        with adapters:
            losses = train(Fixed(model), samples(4), adapters, config, device="cpu")
        return losses, adapters.state_dict(prefix="", dtype=torch.float32)

    batch, accumulated = train_fixed(batch_size=4), train_fixed(batch_size=1, accumulation_steps=4)
    assert math.isclose(batch[0][0], accumulated[0][0], rel_tol=1e-5)
    for name, value in batch[1].items():
        torch.testing.assert_close(value, accumulated[1][name], rtol=1e-5, atol=1e-8)


def test_callbacks_come_in_order():
    seen = []
    callbacks = Callbacks(
        before_micro_step=lambda: seen.append("micro"),
        after_backward=lambda: seen.append("backward"),
        after_step=lambda step, loss: seen.append(step),
    )
    losses, _ = run(callbacks=callbacks, steps=2, accumulation_steps=2)
    assert seen == ["micro", "backward", "micro", "backward", 1, "micro", "backward", "micro", "backward", 2]
    assert len(losses) == 2


def test_a_callback_may_stop_it():
    class Stop(BaseException):
        pass

    def stop():
        raise Stop

    model = build()
    with pytest.raises(Stop):
        run(model, callbacks=Callbacks(before_micro_step=stop))
    assert "ferry_lora" not in dict(model.blocks[0].up.named_children())


def test_a_loss_that_is_not_finite_names_the_step():
    model = build()
    calls = []

    def spoil(step, loss):
        calls.append(step)
        if step == 2:
            model.time.weight.data.fill_(float("nan"))

    with pytest.raises(TrainingError, match="the loss of step 3 of 5"):
        run(model, callbacks=Callbacks(after_step=spoil))
    assert calls == [1, 2]


class SpoiledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * float("inf")


def test_a_gradient_that_is_not_finite_names_the_step_and_the_layer():
    model = build()
    process = RectifiedFlow(lambda noisy, t, conditions: SpoiledGradient.apply(model(noisy, t, conditions)))
    adapters = LoraAdapters(select_targets(model), LoraConfig(), seed=0, device="cpu")
    with adapters, pytest.raises(TrainingError, match=r"a gradient of step 1 .* first in blocks\.1\.down"):
        train(process, samples(), adapters, TrainingConfig(steps=2, learning_rate=1e-3), device="cpu")


@contextlib.contextmanager
def training(model, **changes):
    changes = {"steps": 20, "learning_rate": 1e-2} | changes
    callbacks = changes.pop("callbacks", None)
    config = TrainingConfig(**changes)
    adapters = LoraAdapters(
        select_targets(model), LoraConfig(rank=8, alpha=8.0), seed=config.seed, device="cpu"
    )
    with adapters:
        yield Training(
            RectifiedFlow(model),
            samples(),
            adapters,
            config,
            device="cpu",
            callbacks=callbacks,
            network=model,
        )


def final(run):
    with run.weights.final():
        return run.adapters.state_dict(prefix="", dtype=torch.float32)


VARIANTS = {
    "plain": {},
    "everything": {
        "schedule": "cosine", "warmup_steps": 3, "ema_decay": 0.9, "max_gradient_norm": 0.5,
        "batch_size": 3, "accumulation_steps": 2,
    },
    "adafactor": {"optimizer": "Adafactor"},
    "prodigy": {"optimizer": "Prodigy", "learning_rate": 1.0},
    "schedule-free": {"optimizer": "AdamWScheduleFree"},
}  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
def test_ten_steps_and_ten_more_are_twenty(variant, tmp_path):
    changes = VARIANTS[variant]
    package = {"prodigy": "prodigyopt", "schedule-free": "schedulefree"}.get(variant)
    if package and importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}")
    with training(build(), **changes) as whole:
        whole.run()
    path = tmp_path / "state.safetensors"

    def stop_after(step, loss):
        if step in (4, 10):
            final(first)  # looking at the averaged weights leaves no trace
        if step == 10:
            first.stop()

    with training(build(), callbacks=Callbacks(after_step=stop_after), **changes) as first:
        first.run()
        assert first.step == 10
        save_state(path, first.state())
    torch.manual_seed(99)
    with training(build(), **changes) as second:
        second.load(read_state(path))
        second.run()
    assert second.losses == whole.losses
    expected, found = whole.state().weights, second.state().weights
    for name, value in expected.parameters.items():
        assert torch.equal(found.parameters[name], value)
    for name, value in expected.averages.items():
        assert torch.equal(found.averages[name], value)
    for index, moments in expected.optimizer["state"].items():
        for name, value in moments.items():
            other = found.optimizer["state"][index][name]
            assert torch.equal(other, value) if isinstance(value, torch.Tensor) else other == value
    assert same(final(whole), final(second))


def test_averaged_weights_are_others_than_the_last_ones():
    with training(build(), ema_decay=0.9) as run:
        run.run()
        last = run.adapters.state_dict(prefix="", dtype=torch.float32)
        assert not same(final(run), last)
        assert same(run.adapters.state_dict(prefix="", dtype=torch.float32), last)


def test_dropout_is_the_same_after_a_stop():
    def model():
        network = build()
        network.blocks.append(nn.Dropout(0.5))
        return network.train()

    with training(model()) as whole:
        whole.run()
    with training(model(), steps=10) as first:
        first.run()
        half = first.state()
    with training(model()) as second:
        second.load(half)
        assert second.run() == whole.losses


def test_a_state_with_all_steps_done_is_refused():
    with training(build(), steps=3) as run:
        run.run()
        with pytest.raises(RequestError, match="Raise steps above 3"):
            run.load(run.state())


def test_a_state_whose_optimizer_is_of_another_version_is_refused():
    with training(build(), callbacks=Callbacks(after_step=lambda *_: run.stop())) as run:
        run.run()
        state = run.state()
        del state.weights.optimizer["param_groups"][0]["betas"]
        for optimizer in (state.weights.optimizer, {}):
            weights = dataclasses.replace(state.weights, optimizer=optimizer)
            with pytest.raises(RequestError, match="another version of AdamW"):
                run.load(dataclasses.replace(state, weights=weights))


def test_one_bad_batch_is_skipped_and_changes_nothing():
    model, skipped = build(), []
    bad = {7}
    calls = 0

    def velocity(noisy, t, conditions):
        nonlocal calls
        calls += 1
        return model(noisy, t, conditions) * (math.nan if calls in bad else 1)

    def run(steps):
        nonlocal calls
        calls = 0
        with training(model, steps=steps, callbacks=Callbacks(after_skip=skipped.append)) as run:
            run.process.velocity = velocity
            run.run()
            return run.losses, run.state()

    losses, after_bad = run(10)
    assert len(losses) == 10
    assert after_bad.attempt == 11
    assert "the loss of step 7 of 10 is NaN or infinite" in skipped[0]
    assert "the step is skipped" in skipped[0]
    _, before = run(6)
    bad.clear()
    other, _ = run(10)
    assert losses[:6] == other[:6]
    assert losses[6] != other[6]  # another batch
    assert before.attempt == 6


def test_a_resumed_training_goes_back_to_the_same_weights():
    """Saved at 5, bad twice after 7: both go back to 5, whether they were stopped meanwhile or not."""

    def run(stop_at=0, state=None):
        saved, skipped = [], []

        def after_step(step, loss):
            if step == 5:
                saved.append(made.state())
            if step == stop_at:
                made.stop()

        callbacks = Callbacks(after_step=after_step, after_skip=skipped.append)
        with training(build(), steps=12, callbacks=callbacks) as made:
            velocity = made.process.velocity
            made.process.velocity = lambda *inputs: (
                velocity(*inputs) * (math.nan if made._attempt in (7, 8) else 1)
            )
            if state is not None:
                made.load(state)
            made.run()
            return made.losses, final(made), saved, skipped

    losses, lora, _, skipped = run()
    assert skipped[1].endswith("back at step 5")
    _, _, (state,), _ = run(stop_at=5)
    other_losses, other_lora, _, other_skipped = run(state=state)
    assert (other_losses, other_skipped) == (losses, skipped)
    assert same(lora, other_lora)


def test_clipping_keeps_the_direction():
    def one_step(**changes):
        with training(build(), steps=1, optimizer="SGD", weight_decay=0.0, **changes) as run:
            start = run.state().weights.parameters
            run.run()
            end = run.state().weights.parameters
            return torch.cat([(end[name] - start[name]).flatten() for name in start])

    free, clipped = one_step(), one_step(max_gradient_norm=1e-3)
    assert float(clipped.norm()) == pytest.approx(1e-3 * 1e-2, rel=1e-3)
    assert float(torch.cosine_similarity(free, clipped, dim=0)) == pytest.approx(1, abs=1e-4)


class LocalHelper:
    """Another device that is this process: its own copy of the model, gradients apart from ours."""

    count = 1

    def __init__(self, config):
        model = build()
        adapters = LoraAdapters(select_targets(model), LoraConfig(rank=8, alpha=8.0), seed=0, device="cpu")
        adapters.install()
        self.training = Training(RectifiedFlow(model), samples(), adapters, config, device="cpu")

    def start(self, parameters, shares):
        own = self.training.adapters.named_parameters()
        with torch.no_grad():
            for name, value in parameters.items():
                own[name].copy_(value)
        losses = []
        for step in shares[0]:
            losses.append(0.0)
            for index, batch in enumerate(step.batches):
                loss = self.training._loss(batch, (step.number, index))
                loss.backward()
                losses[-1] += float(loss.detach())
        self.share = Share({name: value.grad for name, value in own.items()}, [losses])

    def finish(self):
        self.training.weights.drop_gradients()
        return self.share


def test_the_first_losses_of_other_devices_are_repeated_when_out_of_memory():
    """Also the comparison before the first step is a pass that may not fit at once."""
    options = {"accumulation_steps": 2, "batch_size": 2}
    config = TrainingConfig(steps=3, learning_rate=1e-2, **options)
    calls, repeated = 0, []

    def run_passes(passes):
        try:
            return passes()
        except torch.OutOfMemoryError:
            repeated.append(calls)
            return passes()

    def velocity(model):
        def forward(*arguments):
            nonlocal calls
            calls += 1
            if calls == 1:
                raise torch.OutOfMemoryError("no memory")
            return model(*arguments)

        return forward

    model = build()
    adapters = LoraAdapters(select_targets(model), LoraConfig(rank=8, alpha=8.0), seed=0, device="cpu")
    with adapters:
        many = Training(
            RectifiedFlow(velocity(model)), samples(), adapters, config, device="cpu",
            callbacks=Callbacks(run_passes=run_passes), helpers=LocalHelper(config),
        )  # fmt: skip
        losses = many.run()
    one, _ = run(steps=3, **options)
    assert repeated == [1]
    assert losses == pytest.approx(one, rel=1e-6)


def test_nothing_to_train_is_named():
    model = build()
    adapters = LoraAdapters(select_targets(model, "time"), LoraConfig(), seed=0, device="cpu")
    process = RectifiedFlow(lambda noisy, t, conditions: noisy)
    with adapters, pytest.raises(TrainingError, match="they name are not called"):
        train(process, samples(), adapters, TrainingConfig(steps=2, learning_rate=1e-3), device="cpu")
