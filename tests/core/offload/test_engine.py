"""What forwards, reads and backwards may do around an offloaded model."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F
from comfyui_ferry.core.offload import OffloadTrainingManager
from ferry_support.offload_cases import (
    CASES,
    WIDTH,
    Residual,
    Stack,
    assert_close,
    build,
    inputs,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

PLACEMENTS = [(None, False), (None, True), (1.0, False), (1.0, True)]
placements = pytest.mark.parametrize(("threshold", "on_host"), PLACEMENTS)


def attach(model: nn.Module, threshold: float | None = None, on_host: bool = False, **more):
    return OffloadTrainingManager(model, "cpu", on_host, threshold, **more)


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(model: nn.Module, plain: nn.Module):
    mine, expected = gradients(model), gradients(plain)
    assert mine.keys() == expected.keys() and mine
    for name in expected:
        assert_close(mine[name], expected[name])


def assert_nothing_left(manager: OffloadTrainingManager):
    assert manager.resident_bytes == manager.resident_set_bytes


def frozen_linears(count: int = 8, width: int = 64) -> Stack:
    torch.manual_seed(0)
    return Stack(*(nn.Linear(width, width, bias=False) for _ in range(count))).requires_grad_(False)


@placements
@pytest.mark.parametrize("checkpointing", ["none", "reentrant", "non_reentrant"])
def test_two_forwards_before_one_backward(threshold, on_host, checkpointing):
    plain, model = build("tied", checkpointing), build("tied", checkpointing)
    manager = attach(model, threshold, on_host)
    for m in (plain, model):
        (m(inputs(0)).square().mean() + m(inputs(1)).sin().mean()).backward()
    assert_nothing_left(manager)
    manager.after_backward()
    assert_same_gradients(model, plain)


@placements
@pytest.mark.parametrize("checkpointing", ["none", "reentrant", "non_reentrant"])
def test_two_backwards_accumulate(threshold, on_host, checkpointing):
    plain, model = build("tied", checkpointing), build("tied", checkpointing)
    manager = attach(model, threshold, on_host)
    for m in (plain, model):
        for step in range(3):
            m(inputs(step)).square().mean().backward()
    manager.after_backward()
    assert_same_gradients(model, plain)


@placements
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_forward_without_gradients_between_forward_and_backward(threshold, on_host, context):
    plain, model = build("batch norm"), build("batch norm")
    manager = attach(model, threshold, on_host)
    results = []
    for m in (plain, model):
        loss = m(inputs(0)).square().mean()
        with context():
            results.append(m(inputs(1)).clone())
            if m is model:
                assert_nothing_left(manager)
        loss.backward()
    assert_nothing_left(manager)
    manager.after_backward()
    assert_close(results[1], results[0])
    assert_same_gradients(model, plain)
    for name, value in plain.state_dict().items():
        assert_close(model.state_dict()[name], value)


class Fails(nn.Module):
    def __init__(self, error: type[BaseException]) -> None:
        super().__init__()
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.error: type[BaseException] | None = error

    def forward(self, x):
        x = self.proj(x) + self.proj.weight.sum()
        if self.error is not None:
            raise self.error("stop")
        return torch.sin(x)  # saves its input: a recompute does not stop before it


@placements
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, torch.OutOfMemoryError, GeneratorExit])
@pytest.mark.parametrize("checkpointing", ["none", "reentrant", "non_reentrant"])
def test_an_exception_in_a_forward_and_a_retry(threshold, on_host, error, checkpointing):
    torch.manual_seed(0)
    plain = Stack(Residual(), Fails(error), Residual())
    torch.manual_seed(0)
    model = Stack(Residual(), Fails(error), Residual())
    plain.checkpointing = model.checkpointing = checkpointing
    manager = attach(model, threshold, on_host)
    depth = torch._C._autograd._top_saved_tensors_default_hooks(True)
    for _ in range(2):
        with pytest.raises(error):
            model(inputs(0))
        assert_nothing_left(manager)
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is depth
    for m in (plain, model):
        m.blocks[1].error = None
        m(inputs(0)).square().mean().backward()
    assert_nothing_left(manager)
    manager.after_backward()
    assert_same_gradients(model, plain)
    manager.remove()


@placements
@pytest.mark.parametrize("checkpointing", ["none", "reentrant", "non_reentrant"])
def test_an_exception_in_a_backward_and_a_retry(threshold, on_host, checkpointing):
    plain, model = build("residual", checkpointing), build("residual", checkpointing)
    manager = attach(model, threshold, on_host)

    def fail(gradient):
        raise ArithmeticError("stop")

    x = inputs(0)
    h = model.blocks[1](model.blocks[0](x))
    h.register_hook(fail)
    with pytest.raises(ArithmeticError):
        model.blocks[3](model.blocks[2](h)).square().mean().backward()
    del h
    assert_nothing_left(manager)
    for m in (plain, model):
        m.zero_grad()
        m(inputs(0)).square().mean().backward()
    assert_nothing_left(manager)
    manager.after_backward()
    assert_same_gradients(model, plain)


def test_an_exception_in_a_recompute_leaves_nothing():
    torch.manual_seed(0)
    model = Stack(Residual(), Fails(ArithmeticError), Residual())
    model.checkpointing = "non_reentrant"
    model.blocks[1].error = None
    manager = attach(model)
    loss = model(inputs(0)).square().mean()
    model.blocks[1].error = ArithmeticError
    with pytest.raises(ArithmeticError):
        loss.backward()
    assert_nothing_left(manager)


@pytest.mark.parametrize("checkpointing", ["none", "reentrant", "non_reentrant"])
def test_memory_is_freed_layer_by_layer(checkpointing):
    """Peak: the layer in use and the cached ones, never the model, with checkpointing or without."""
    model = frozen_linears()
    model.checkpointing = checkpointing
    one = 64 * 64 * 4
    manager = attach(model, recompute_cache_mb=2 * one / 2**20)
    x = torch.randn(4, 64, requires_grad=True)
    loss = model(x).square().mean()
    assert manager.resident_bytes == 0
    assert manager.stats().peak_resident_bytes <= (2 if checkpointing == "reentrant" else 1) * one
    loss.backward()
    assert manager.resident_bytes == 0
    assert manager.stats().peak_resident_bytes <= 3 * one
    assert manager.stats().slot_bytes <= 3 * one


def test_autograd_holds_no_slot_between_forward_and_backward():
    """Every slot's storage is used by the engine alone once the forward is over."""
    model = frozen_linears()
    manager = attach(model)
    loss = model(torch.randn(4, 64, requires_grad=True)).square().mean()
    pool = manager._engine.residency.pool
    assert pool._free and not any(slot.is_viewed() for slot in pool._free)
    assert manager._engine.residency._held == []
    loss.backward()


@pytest.mark.parametrize("checkpointing", ["reentrant", "non_reentrant"])
def test_recompute_and_backward_share_one_copy(checkpointing):
    model = frozen_linears(4)
    model.checkpointing = checkpointing
    manager = attach(model)
    model(torch.randn(4, 64, requires_grad=True)).square().mean().backward()
    # The backward begins with the layer that the forward ended with, in the one slot that it took.
    assert manager.stats().moved_to_target_bytes == (4 + 3) * 64 * 64 * 4


@pytest.mark.parametrize("write", ["data", "no_grad", "assign"])
def test_a_weight_changed_between_steps_is_copied_again(write):
    """Also where the change leaves no trace: what free slots hold is taken back within a step only."""
    model, plain = frozen_linears(2), frozen_linears(2)
    plain.load_state_dict(model.state_dict())
    manager = attach(model)
    x = torch.randn(4, 64, requires_grad=True)
    for factor in (1.0, 2.0, 0.5):
        for each in (model, plain):
            weight = each.blocks[1].weight
            if write == "data":
                weight.data.mul_(factor)
            elif write == "no_grad":
                with torch.no_grad():
                    weight.mul_(factor)
            else:
                each.blocks[1].weight = nn.Parameter(weight.detach() * factor, requires_grad=False)
        for forward_only in (True, False):
            mine, expected = (each(x).square().mean() for each in (model, plain))
            assert_close(mine, expected)
            if not forward_only:
                one, other = (torch.autograd.grad(loss, x)[0] for loss in (mine, expected))
                assert_close(one, other)
    assert manager.resident_bytes == 0


def test_a_weight_changed_after_its_forward_is_not_taken_back():
    model = frozen_linears(2)
    attach(model)
    x = torch.randn(4, 64, requires_grad=True)
    loss = model(x).square().mean()
    with torch.no_grad():
        model.blocks[1].weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_one_scope_serves_a_whole_block(monkeypatch):
    """Modules inside a block that moves as a whole cost nothing but the question."""
    from comfyui_ferry.core.offload.engine import Engine

    entered = []
    plain = Engine.enter
    monkeypatch.setattr(Engine, "enter", lambda self, unit: entered.append(unit.path) or plain(self, unit))
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.SiLU(), nn.Sequential(nn.Linear(8, 8))))
    attach(model.requires_grad_(False), 1.0)
    for module in (model, model[1]):
        module(torch.randn(2, 8))
    assert len(entered) == 2


def test_the_recompute_cache_is_bounded():
    """One checkpoint around everything: without a limit all layers would be on the target."""
    model = frozen_linears(8)
    one = 64 * 64 * 4
    manager = attach(model, recompute_cache_mb=3 * one / 2**20)
    x = torch.randn(4, 64, requires_grad=True)
    checkpoint(model, x, use_reentrant=False).square().mean().backward()
    assert manager.stats().peak_resident_bytes <= 4 * one
    assert_nothing_left(manager)


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("grad", [True, False])
def test_the_encoder_layers_fast_path(nested, grad):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, batch_first=True)
    plain = nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested).eval()
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested).eval()
    manager = attach(model)
    x = torch.randn(2, 5, WIDTH)
    mask = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    with torch.set_grad_enabled(grad):
        expected, actual = plain(x, src_key_padding_mask=mask), model(x, src_key_padding_mask=mask)
    assert_close(actual.detach(), expected.detach())
    assert_nothing_left(manager)


@placements
def test_retained_graph_and_higher_derivatives(threshold, on_host):
    plain, model = build("residual"), build("residual")
    manager = attach(model, threshold, on_host)
    for m in (plain, model):
        x = inputs(0)
        loss = m(x).square().mean()
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        (penalty,) = torch.autograd.grad(loss, x, create_graph=True)
        penalty.square().sum().backward()
        del loss, penalty
    assert_nothing_left(manager)
    manager.after_backward()
    assert_same_gradients(model, plain)


@placements
def test_autograd_grad_leaves_accumulated_gradients_alone(threshold, on_host):
    plain, model = build("residual"), build("residual")
    manager = attach(model, threshold, on_host)
    for m in (plain, model):
        m(inputs(0)).square().mean().backward()
        loss = m(inputs(1)).square().mean()
        found = torch.autograd.grad(loss, list(m.parameters()), allow_unused=True)
        m.found = [g.clone() for g in found]
    manager.after_backward()
    for mine, expected in zip(model.found, plain.found, strict=True):
        assert_close(mine, expected)
    assert_same_gradients(model, plain)
    assert_nothing_left(manager)


def test_reading_outside_a_forward_moves_nothing():
    model = build("reads child").requires_grad_(False)
    manager = attach(model)
    weight = model.blocks[1].child.weight
    host = weight.data_ptr()
    assert model.blocks[1].child.weight.data_ptr() == host
    nn.init.ones_(model.blocks[1].child.weight)
    assert manager.stats().moved_to_target_bytes == 0
    assert torch.equal(model.state_dict()["blocks.1.child.weight"], torch.ones(WIDTH, WIDTH))


def test_a_method_called_from_outside_reads_in_a_forward_scope():
    plain, model = build("reads child"), build("reads child")
    model.requires_grad_(False)
    manager = attach(model)
    host = model.blocks[1].gain.data_ptr()
    x = inputs(0)
    with manager.forward_scope():
        actual = model.blocks[1].normalise(x)
        assert model.blocks[1].gain.data_ptr() != host
        assert manager.resident_bytes > 0
    assert model.blocks[1].gain.data_ptr() == host
    assert_nothing_left(manager)
    assert_close(actual.detach(), plain.blocks[1].normalise(x).detach())


def test_a_demand_read_is_pinned_until_its_forward_ends():
    seen = []

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.child = nn.Linear(WIDTH, WIDTH)
            self.other = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            weight = self.child.weight
            target = weight.data_ptr()
            x = self.other(x)
            seen.append(weight.data_ptr() == target)
            return F.linear(x, weight)

    model = nn.Sequential(Outer(), nn.Linear(WIDTH, WIDTH)).requires_grad_(False)
    host = dict(model.named_parameters())["0.child.weight"].data_ptr()
    manager = attach(model)
    model[1].register_forward_pre_hook(lambda module, args: seen.append(manager.resident_bytes == 0))
    model(inputs(0))
    assert seen == [True, True]
    assert host != model[0].child.weight.data_ptr()
    assert_nothing_left(manager)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_function_that_reads_weights_itself(reentrant):
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
            self.child = nn.Linear(WIDTH, WIDTH)

        def part(self, x):
            return torch.tanh(x @ self.weight) @ self.child.weight

        def forward(self, x):
            return checkpoint(self.part, x, use_reentrant=reentrant)

    torch.manual_seed(0)
    plain = nn.Sequential(Functional(), Functional())
    torch.manual_seed(0)
    model = nn.Sequential(Functional(), Functional())
    manager = attach(model, None, True)
    for m in (plain, model):
        m(inputs(0)).square().mean().backward()
    assert_nothing_left(manager)
    manager.after_backward()
    assert_same_gradients(model, plain)


def test_an_output_that_is_a_view_of_a_weight_stays_valid():
    class View(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH), requires_grad=False)

        def forward(self):
            return self.weight.t()

    model = nn.ModuleDict({"view": View(), "other": View()})
    expected = model["view"].weight.t().clone()
    manager = attach(model)
    view = model["view"]()
    for _ in range(3):
        model["other"]()
    assert torch.equal(view, expected)
    assert manager.resident_bytes == WIDTH * WIDTH * 4
    del view
    assert manager.resident_bytes == 0


@pytest.mark.parametrize("name", CASES)
def test_evaluation_equals_the_plain_model(name):
    plain, model = build(name).eval(), build(name).eval()
    manager = attach(model)
    with torch.no_grad():
        assert_close(model(inputs(0)), plain(inputs(0)))
    assert_nothing_left(manager)


def test_two_threads_may_run_the_model_at_once():
    plain, model = build("residual").requires_grad_(False), build("residual").requires_grad_(False)
    manager = attach(model)
    failures: list[BaseException] = []

    def work(start: int) -> None:
        try:
            for step in range(start, start + 20):
                x = inputs(step)
                model(x).square().mean().backward()
                y = inputs(step)
                plain(y).square().mean().backward()
                assert_close(x.grad, y.grad)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(100 * i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    assert_nothing_left(manager)


def test_a_backward_inside_a_forward():
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.energy = nn.Linear(WIDTH, 1)

        def forward(self, x):
            with torch.enable_grad():
                y = x.detach().requires_grad_()
                (force,) = torch.autograd.grad(torch.tanh(self.energy(y)).sum(), y)
            return self.energy(x + force)

    torch.manual_seed(0)
    plain = Stack(Residual(), Inner())
    torch.manual_seed(0)
    model = Stack(Residual(), Inner())
    manager = attach(model, None, True)
    for m in (plain, model):
        m(inputs(0)).mean().backward()
    assert_nothing_left(manager)
    manager.after_backward()
    assert_same_gradients(model, plain)


def test_vectorising_transforms_see_the_same_model():
    plain, model = build("residual").requires_grad_(False), build("residual").requires_grad_(False)
    manager = attach(model)
    x = torch.randn(3, 2, WIDTH)
    with torch.no_grad():
        assert_close(torch.func.vmap(model)(x), torch.func.vmap(plain)(x))
    assert_nothing_left(manager)
