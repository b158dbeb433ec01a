"""Cached modulation: the very bits that the layer returns, without its weights on the link."""

from __future__ import annotations

import pytest
import torch
from comfyui_ferry.core.errors import RequestError
from comfyui_ferry.core.module_hooks import ModuleHook, hook_names, install_hook
from comfyui_ferry.core.offload import ModulationLayers, ModulationPlan, OffloadTrainingManager
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH, BLOCKS = 24, 3
BLOCK_BYTES = WIDTH * WIDTH * 4
MODULATION_BYTES = (WIDTH + 1) * 2 * WIDTH * 4
THRESHOLD_MB = 2.5 * BLOCK_BYTES / 2**20  # a block without its modulation moves as a whole
PLAN = ModulationPlan((ModulationLayers("blocks.*.modulation", "1"), ModulationLayers("final")), limit_mb=1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, 2 * WIDTH))
        self.base = nn.Linear(WIDTH, WIDTH, bias=False)
        self.adapter = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x, vec):
        modulation = self.modulation(vec)
        shift, scale = modulation[:, None].chunk(2, -1)
        h = x * (1 + scale) + shift
        if not modulation.requires_grad:
            modulation.mul_(3)  # a model may do as it likes with what it was given
        return x + self.base(h) + self.adapter(h)


class Model(nn.Module):
    """A small AdaLN transformer with trainable adapters."""

    def __init__(self, checkpointing="none"):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(1, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.final = nn.Linear(WIDTH, WIDTH)
        self.checkpointing = checkpointing
        for name, parameter in self.named_parameters():
            parameter.requires_grad_("adapter" in name)

    def forward(self, x, t):
        vec = self.embed(t)
        for block in self.blocks:
            if self.checkpointing == "none" or not torch.is_grad_enabled():
                x = block(x, vec)
            else:
                x = checkpoint(block, x, vec, use_reentrant=self.checkpointing == "reentrant")
        return x * self.final(vec)[:, None]


def inputs(step, batch=1):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(batch, 5, WIDTH, generator=generator), torch.rand(batch, 1, generator=generator)


def make(checkpointing="none", plan=PLAN, **more):
    model = Model(checkpointing)
    manager = OffloadTrainingManager(
        model, "cpu", cpu_offload_split_threshold=THRESHOLD_MB, modulation=plan, **more
    )
    return model, manager, manager.modulation_cache


def step(model, *arguments):
    model.zero_grad()
    x = arguments[0].clone().requires_grad_()
    loss = model(x, arguments[1]).square().mean()
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def moved(manager, function):
    before = manager.stats().moved_to_target_bytes
    result = function()
    return result, manager.stats().moved_to_target_bytes - before


@pytest.mark.parametrize("checkpointing", ["none", "reentrant", "non_reentrant"])
def test_training_is_bitwise_the_same_and_moves_no_modulation(checkpointing):
    plain = Model(checkpointing)
    model, manager, cache = make(checkpointing)
    seen = {}
    state = torch.get_rng_state()
    calls = [lambda i=i: seen.update({i: model(*inputs(i))}) for i in range(4)]
    prepared, ahead_bytes = moved(manager, lambda: cache.precompute(calls))
    assert prepared == 4 and not seen  # a call is not run to its end
    assert torch.equal(torch.get_rng_state(), state)
    # Each layer once for all four; and what a call needs before them, with what is started ahead.
    assert ahead_bytes <= BLOCKS * MODULATION_BYTES + 8 * BLOCK_BYTES
    for index in range(4):
        expected = step(plain, *inputs(index))
        actual, step_bytes = moved(manager, lambda index=index: step(model, *inputs(index)))
        assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
        assert step_bytes <= 2 * (BLOCKS * BLOCK_BYTES + (1 + 1) * WIDTH * 4 + 64)
    assert cache.num_misses == 0
    assert manager.resident_bytes == manager.resident_set_bytes


def test_what_was_not_prepared_is_computed_and_then_kept_for_the_recompute():
    plain = Model("non_reentrant")
    model, _, cache = make("non_reentrant")
    cache.precompute([lambda: model(*inputs(0))])
    # Another batch shape, another dtype's bits, one element off by one bit.
    x, t = inputs(0)
    nudged = torch.nextafter(t, torch.tensor(2.0))
    for arguments in ((x.expand(2, -1, -1), t.expand(2, 1)), (x, nudged), inputs(7)):
        expected = step(plain, *arguments)
        assert all(torch.equal(a, b) for a, b in zip(step(model, *arguments), expected, strict=True))
    assert cache.num_misses == 3 * (BLOCKS + 1)
    assert cache.num_hits == 3 * BLOCKS  # the recomputes; `final` has none


@pytest.mark.parametrize("change", ["in place", "load_state_dict", "assigned", "data"])
def test_changed_weights_are_seen(change):
    plain, (model, _, cache) = Model(), make()
    for m in (plain, model):
        with torch.no_grad():
            m(*inputs(0))
            linear = m.blocks[1].modulation[1]
            if change == "in place":
                linear.weight.mul_(2)
            elif change == "load_state_dict":
                m.load_state_dict({name: value * 1.5 for name, value in m.state_dict().items()})
            elif change == "assigned":
                linear.weight = nn.Parameter(linear.weight.detach() * 2, requires_grad=False)
            else:
                linear.bias.data = linear.bias.detach() * 2
    hits = cache.num_hits
    with torch.no_grad():
        assert torch.equal(model(*inputs(0)), plain(*inputs(0)))
    assert (cache.num_hits > hits) == (change != "load_state_dict")


class _Adapter(ModuleHook):
    def __init__(self, weight):
        self.weight = weight

    def run(self, forward, module, args, kwargs):
        return forward(*args, **kwargs) + args[0] @ self.weight


def test_an_adapter_on_a_modulation_layer_learns():
    """Around the cache it runs every time; inside it (put on later) it switches the cache off."""
    plain, (model, manager, cache) = Model(), make()
    manager.remove()
    weight = torch.zeros(WIDTH, 2 * WIDTH, requires_grad=True)
    for m in (plain, model):
        install_hook(m.blocks[0].modulation[1], "lora", _Adapter(weight))
    manager = OffloadTrainingManager(model, "cpu", cpu_offload_split_threshold=THRESHOLD_MB, modulation=PLAN)
    cache = manager.modulation_cache
    cache.precompute([lambda: model(*inputs(0))])
    late = torch.zeros(WIDTH, 2 * WIDTH, requires_grad=True)
    for m in (plain, model):
        install_hook(m.blocks[2].modulation[1], "late lora", _Adapter(late))
    for value in (0.0, 0.1):
        for w in (weight, late):
            w.data.fill_(value)
        results = []
        for m in (plain, model):
            weight.grad = late.grad = None
            results.append([*step(m, *inputs(0)), weight.grad, late.grad])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
        assert results[1][-1].abs().sum() > 0 and results[1][-2].abs().sum() > 0
    assert cache.num_hits == 2 * BLOCKS  # all but the one with the late hook


def test_a_layer_that_trains_itself_is_left_alone():
    plain, model = Model(), Model()
    for m in (plain, model):
        m.blocks[0].modulation[1].weight.requires_grad_()
    manager = OffloadTrainingManager(model, "cpu", modulation=PLAN)
    assert len(manager.modulation_cache.layers) == BLOCKS
    for _ in range(2):
        expected = step(plain, *inputs(0))
        assert all(torch.equal(a, b) for a, b in zip(step(model, *inputs(0)), expected, strict=True))


def test_memory_is_bounded_and_what_waits_is_kept():
    one_call = (BLOCKS * 2 + 1) * WIDTH * 4
    plan = ModulationPlan(PLAN.layers, limit_mb=2.5 * one_call / 2**20)
    model, _, cache = make(plan=plan)
    assert cache.precompute([lambda i=i: model(*inputs(i)) for i in range(5)]) == 2
    assert cache.stored_bytes == 2 * one_call
    with torch.no_grad():
        model(*inputs(9))  # finds little room, and must not push out what is to come
    assert cache.stored_bytes <= cache.limit_bytes
    hits = cache.num_hits
    with torch.no_grad():
        model(*inputs(0)), model(*inputs(1))
    assert cache.num_hits - hits == 2 * (BLOCKS + 1)
    assert cache.precompute([lambda i=i: model(*inputs(i)) for i in range(2, 5)]) == 2
    assert cache.stored_bytes <= cache.limit_bytes


def test_sampling_repeats_its_noise_levels():
    model, manager, cache = make()
    with torch.inference_mode():
        assert cache.precompute([lambda i=i: model(*inputs(i)) for i in range(3)]) == 3
        for _ in range(2):
            for index in range(3):
                _, nbytes = moved(manager, lambda index=index: model(*inputs(index)))
                assert nbytes < BLOCKS * (BLOCK_BYTES + 200)
    assert cache.num_misses == 0


def test_removal_leaves_nothing():
    model, manager, cache = make()
    cache.precompute([lambda: model(*inputs(0))])
    manager.remove()
    assert cache.stored_bytes == 0
    assert all(not hook_names(module) and "forward" not in module.__dict__ for module in model.modules())


def test_a_call_that_reaches_no_layer_is_an_error():
    _, manager, cache = make()
    with pytest.raises(RequestError, match="call 0"):
        cache.precompute([lambda: None])
    assert manager.resident_bytes == manager.resident_set_bytes
