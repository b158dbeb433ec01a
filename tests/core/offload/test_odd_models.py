"""Models and surroundings that are legal but unusual."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from comfyui_ferry.core.offload import OffloadTrainingManager
from ferry_support.offload_cases import WIDTH, Attention, Residual, Stack, assert_close, build, inputs
from torch import nn
from torch.utils.checkpoint import checkpoint


def assert_equal_to_plain(make, run=lambda m, step: m(inputs(step)).square().mean(), on_host=True, steps=2):
    """Train the plain and the managed model with a plain SGD step and compare everything."""
    torch.manual_seed(0)
    plain = make()
    torch.manual_seed(0)
    model = make()
    manager = OffloadTrainingManager(model, "cpu", on_host)
    for step in range(steps):
        losses = []
        for m in (plain, model):
            m.zero_grad()
            loss = run(m, step)
            loss.backward()
            losses.append(loss.detach())
        assert manager.resident_bytes == manager.resident_set_bytes
        manager.after_backward()
        assert_close(losses[1], losses[0])
        for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert (mine.grad is None) == (other.grad is None)
            if other.grad is not None:
                assert_close(mine.grad, other.grad)
                with torch.no_grad():
                    mine.sub_(mine.grad, alpha=0.01), other.sub_(other.grad, alpha=0.01)
    return manager


def test_a_model_without_tensors():
    model = nn.Sequential(nn.ReLU(), nn.Identity())
    with OffloadTrainingManager(model, "cpu") as manager:
        assert model(inputs(0)).shape == (4, WIDTH)
        manager.after_backward()
        assert manager.stats().streamed_bytes == 0


def test_a_model_of_empty_tensors():
    model = nn.Sequential(nn.Linear(0, 0), nn.Linear(0, 3))
    with OffloadTrainingManager(model, "cpu", True):
        model(torch.zeros(2, 0)).sum().backward()


def test_a_single_leaf_is_the_model():
    assert_equal_to_plain(lambda: nn.Linear(WIDTH, WIDTH))


def test_a_container_as_the_root():
    def run(m, step):
        x = inputs(step)
        for key in m:
            x = m[key](x)
        return x.square().mean()

    assert_equal_to_plain(lambda: nn.ModuleDict({"a": Residual(), "b": Attention()}), run)


def test_a_penalty_over_all_parameters_in_the_forward():
    class Penalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Residual()

        def forward(self, x):
            return self.inner(x).square().mean() + sum(p.square().sum() for p in self.parameters())

    assert_equal_to_plain(Penalised, lambda m, step: m(inputs(step)))


def test_a_module_that_calls_itself():
    class Recursive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = nn.Linear(WIDTH, WIDTH)
            self.gain = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x, depth=3):
            x = torch.tanh(self.proj(x) * self.gain)
            return self(x, depth - 1) * self.gain if depth else x

    assert_equal_to_plain(Recursive)


@pytest.mark.parametrize("on_host", [False, True])
def test_autocast(on_host):
    def run(m, step):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return m(m(inputs(step))).float().square().mean()

    assert_equal_to_plain(lambda: build("multi-head attention"), run, on_host)


@pytest.mark.parametrize("on_host", [False, True])
def test_activations_kept_elsewhere_by_hooks_around(on_host):
    def run(m, step):
        with torch.autograd.graph.save_on_cpu():
            return m(inputs(step)).square().mean()

    assert_equal_to_plain(lambda: build("residual"), run, on_host)


def test_hooks_around_see_activations_but_not_weights():
    model = build("residual").requires_grad_(False)
    weights = {tuple(p.shape) for p in model.parameters() if p.dim() == 2}
    seen = []
    OffloadTrainingManager(model, "cpu")
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(tuple(t.shape)) or t, lambda t: t):
        model(inputs(0)).square().mean().backward()
    assert seen and not weights & set(seen)


def test_selective_checkpointing():
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    def policy(context, op, *args, **kwargs):
        keep = op in (torch.ops.aten.addmm.default, torch.ops.aten.copy_.default)
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    def run(m, step):
        x = inputs(step)
        for block in m.blocks:
            x = checkpoint(
                block, x, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(policy)
            )
        return x.square().mean()

    assert_equal_to_plain(lambda: build("residual"), run)


@pytest.mark.parametrize("inner", [True, False])
@pytest.mark.parametrize("outer", [True, False])
def test_nested_checkpoints(inner, outer):
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Residual(), Residual()

        def forward(self, x):
            x = checkpoint(self.a, x, use_reentrant=inner)
            return checkpoint(self.b, x, use_reentrant=inner)

    def run(m, step):
        x = inputs(step)
        for block in m.blocks:
            x = checkpoint(block, x, use_reentrant=outer)
        return x.square().mean()

    assert_equal_to_plain(lambda: Stack(Block(), Block()), run)


def test_a_default_device_does_not_reach_the_engine():
    torch.manual_seed(0)
    model = build("tied")
    expected = model(inputs(0)).detach()
    model.zero_grad()
    with torch.device("meta"):
        manager = OffloadTrainingManager(model, "cpu", True)
        x = torch.ones(1, WIDTH, device="cpu", requires_grad=True)
        F.linear(model.blocks[0](x), torch.ones(1, WIDTH, device="cpu")).sum().backward()
        manager.after_backward()
    assert_close(model(inputs(0)).detach(), expected)


def test_full_backward_hooks_of_the_user():
    def make():
        model = build("residual")
        model.calls = []
        for block in model.blocks:
            block.register_full_backward_hook(
                lambda module, gi, go: model.calls.append(type(module).__name__)
            )
        return model

    assert_equal_to_plain(make)


def test_pruned_weights():
    from torch.nn.utils import prune

    def make():
        model = build("residual")
        prune.l1_unstructured(model.blocks[1].up, "weight", amount=0.5)
        return model

    assert_equal_to_plain(make)


def test_a_module_whose_forward_was_replaced_on_the_object():
    def make():
        model = build("residual")
        linear = model.blocks[0]
        linear.forward = lambda x: F.linear(x, linear.weight * 2)
        return model

    assert_equal_to_plain(make)


def test_gradient_scaling_hooks_and_frozen_halves():
    def make():
        model = build("residual")
        for i, p in enumerate(model.parameters()):
            p.requires_grad_(i % 2 == 0)
        return model

    for on_host in (False, True):
        assert_equal_to_plain(make, on_host=on_host)


def test_nothing_trains():
    def make():
        return build("multi-head attention").requires_grad_(False)

    assert_equal_to_plain(make).remove()
