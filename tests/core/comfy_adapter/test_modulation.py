"""The modulation cache on ComfyUI's own classes: the same bits, nothing recomputed that was planned."""

from __future__ import annotations

import pytest
import torch
from ferry_support.tiny_patchers import PATCHERS

pytestmark = [pytest.mark.comfy, pytest.mark.timeout(300)]

# How many layers each tiny model has, all of them computed once a micro-step ahead.
LAYERS = {"flux": 2 * 2 + 2, "qwen": 2 * 3, "sd3": 2 * 2 + 1, "z-image": 2 + 2 + 1}


class Session:
    """A training without files and without a server."""

    def after_step(self, step, loss):
        pass

    def after_skip(self, what):
        raise AssertionError(what)

    def run(self, training):
        training.run()


def train(kind, *, limit_mb, targets="", captions=(7, 9)):
    """Train a little and return the adapters, the losses and the cache's figures."""
    from comfyui_ferry.core.comfy_adapter.prepared_model import prepared_model
    from comfyui_ferry.core.comfy_adapter.train_lora import TrainingRequest
    from comfyui_ferry.core.comfy_adapter.trainable_model import borrowed_model
    from comfyui_ferry.core.comfy_adapter.training_inputs import read_samples
    from comfyui_ferry.core.training import LoraConfig, OffloadSettings, TrainingConfig

    tiny = PATCHERS[kind]
    request = TrainingRequest(
        LoraConfig(2, 2.0, targets),
        TrainingConfig(steps=2, learning_rate=1e-2, batch_size=2),
        OffloadSettings(split_threshold_mb=1.0, modulation_cache_mb=limit_mb),
    )
    with borrowed_model(tiny.build(), dtype=torch.float32, keep_on_host=True) as patcher:
        captions = [tiny.caption(index, tokens) for index, tokens in enumerate(captions)]
        samples = read_samples(patcher, [tiny.latent(0, 2)], captions)
        with prepared_model(patcher, request) as run:
            losses = run.train(samples, request.training, Session()).losses
            cache = run.manager.modulation_cache
            figures = (cache.num_hits, cache.num_misses, len(cache.layers)) if cache else None
            return run.adapters.state_dict(prefix="", dtype=torch.float32), losses, figures


def assert_same_bits(actual, expected):
    assert actual.keys() == expected.keys() and len(expected) > 3
    assert all(torch.equal(actual[name], value) for name, value in expected.items())


@pytest.mark.parametrize("kind", sorted(LAYERS))
def test_training_is_bitwise_the_same(kind):
    """Captions of two lengths, so a batch is two calls of the model."""
    plain, losses, nothing = train(kind, limit_mb=0)
    cached, cached_losses, figures = train(kind, limit_mb=16)
    assert nothing is None
    assert cached_losses == losses
    assert_same_bits(cached, plain)
    hits, misses, layers = figures
    assert layers == LAYERS[kind]
    # Every one of 2 x 2 calls asks each layer once or, where checkpointed, twice. Only the check
    # of the model's rewritten methods, before the training, asks for what was not planned.
    assert hits >= 4 * layers
    assert misses <= 2 * layers


def test_adapters_on_the_modulation_layers_themselves():
    targets = "transformer_blocks.*.img_mod, transformer_blocks.*.attn"
    plain, losses, _ = train("qwen", limit_mb=0, targets=targets)
    cached, cached_losses, (hits, _, layers) = train("qwen", limit_mb=16, targets=targets)
    assert any("img_mod" in name and value.abs().sum() > 0 for name, value in plain.items())
    assert cached_losses == losses and hits >= 4 * layers
    assert_same_bits(cached, plain)


class FakeCache:
    """Room for ``room`` calls at a time."""

    layers = (object(),)
    limit_bytes = 0

    def __init__(self, room):
        self.room = room
        self.asked = []

    def precompute(self, calls):
        self.asked.append([call for call, _ in zip(calls, range(self.room), strict=False)])
        return len(self.asked[-1])


@pytest.mark.parametrize(("room", "expected"), [(5, [0, 2, 4]), (2, [0, 1, 2, 3, 4]), (1, [0])])
def test_it_computes_ahead_when_nothing_is_left(room, expected):
    """Micro-steps of two calls each; with room for less than one of them it gives up."""
    from comfyui_ferry.core.comfy_adapter.modulation import ModulationAhead

    cache, step, asked_at = FakeCache(room), [0], []
    ahead = ModulationAhead(cache, None, lambda: iter([["a", "b"]] * (5 - step[0])))
    ahead._calls = lambda batch: [batch]
    for step[0] in range(5):
        before = len(cache.asked)
        ahead.before_micro_step()
        asked_at += [step[0]] * (len(cache.asked) - before)
    assert asked_at == expected
