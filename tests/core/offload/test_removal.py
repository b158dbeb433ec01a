"""Nothing of the engine stays behind, and nothing of the model gets lost on the way."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
from comfyui_ferry.core.errors import OffloadError
from comfyui_ferry.core.offload import OffloadTrainingManager
from ferry_support.offload_cases import CASES, WIDTH, Stack, assert_close, build, dequantized, inputs, train
from torch import nn


def snapshot(model: nn.Module) -> dict:
    """Everything that must come back: objects, bytes, aliasing, types, `__dict__` keys, hooks."""
    tensors = {}
    for path, module in model.named_modules():
        for kind in ("_parameters", "_buffers"):
            holder = module.__dict__[kind]
            tensors[path, kind, "dict"] = (id(holder), type(holder))
            for name, tensor in holder.items():
                if tensor is None:
                    tensors[path, kind, name] = None
                    continue
                tensors[path, kind, name] = (
                    id(tensor),
                    type(tensor),
                    tensor.dtype,
                    tensor.device,
                    tuple(tensor.size()),
                    tensor.stride(),
                    tensor.requires_grad,
                    tensor.is_inference(),
                    None if tensor._backward_hooks is None else len(tensor._backward_hooks),
                    tensor._post_accumulate_grad_hooks,
                    tuple(vars(tensor)) if hasattr(tensor, "__dict__") else (),
                    dequantized(tensor).contiguous().view(-1).view(torch.uint8).numpy().tobytes(),
                )
        tensors[path, "keys"] = tuple(module.__dict__)
    return tensors


def overlaps(model: nn.Module) -> set:
    """Pairs of names whose memory overlaps, with the distance between them."""
    spans = []
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]:
        if type(tensor) in (torch.Tensor, nn.Parameter) and tensor.numel():
            low = tensor.data_ptr()
            last = sum((n - 1) * s for n, s in zip(tensor.size(), tensor.stride(), strict=True))
            spans.append((name, low, low + (last + 1) * tensor.element_size()))
    return {
        (a, b, low_a - low_b)
        for a, low_a, high_a in spans
        for b, low_b, high_b in spans
        if a < b and low_a < high_b and low_b < high_a
    }


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("threshold", [None, 1.0])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("use", ["unused", "evaluated", "failed"])
def test_removal_is_bit_identical(name, threshold, on_host, use):
    model = build(name).eval()
    before, aliases = snapshot(model), overlaps(model)
    manager = OffloadTrainingManager(model, "cpu", on_host, threshold)
    assert overlaps(model) == aliases
    if use == "evaluated" and name not in ("writes buffers",):
        with torch.no_grad():
            model(inputs(0))
    if use == "failed":
        with pytest.raises(RuntimeError):
            model(torch.randn(3, 5))
    manager.remove()
    manager.remove()
    assert snapshot(model) == before
    assert overlaps(model) == aliases


def test_gradients_and_training_go_on_after_removal():
    plain, model = build("tied"), build("tied")
    expected = [train(plain), train(plain)]
    with OffloadTrainingManager(model, "cpu", True) as manager:
        train(model, manager)
        model(inputs(9)).sum().backward()
        manager.after_backward()
        kept = {name: p.grad for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        assert p.grad is kept[name]
    model.zero_grad()
    again = train(model)
    for mine, other in zip(again.losses, expected[1].losses, strict=True):
        assert_close(mine, other)


def test_a_graph_outlives_the_removal():
    plain, model = build("tied"), build("tied")
    manager = OffloadTrainingManager(model, "cpu")
    losses = [m(inputs(0)).square().mean() for m in (plain, model)]
    manager.remove()
    for loss in losses:
        loss.backward()
    for (name, mine), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert_close(mine.grad, other.grad), name


def test_removal_frees_the_slots_at_once():
    model = build("residual").requires_grad_(False)
    manager = OffloadTrainingManager(model, "cpu")
    engine = manager._engine
    model(inputs(0))
    assert manager.stats().slot_bytes > 0
    manager.remove()
    assert engine.residency.pool.allocated_bytes == 0


def test_removal_inside_a_forward_is_refused():
    class Removes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            manager.remove()
            return self.proj(x)

    model = Removes()
    manager = OffloadTrainingManager(model, "cpu")
    with pytest.raises(OffloadError, match="1 forward"):
        model(inputs(0))
    manager.remove()


def test_a_second_manager_takes_over():
    plain, model = build("tied"), build("tied")
    before = snapshot(model)
    first = OffloadTrainingManager(model, "cpu", False)
    second = OffloadTrainingManager(model, "cpu", True)
    expected = train(plain, steps=1)
    actual = train(model, first, steps=1)  # the old handle's after_backward reaches the new one
    for name in expected.gradients[0]:
        assert_close(actual.gradients[0][name], expected.gradients[0][name])
    first.remove()
    assert second.stats().streamed_bytes > 0
    with pytest.raises(OffloadError, match="was removed"):
        first.stats()
    second.remove()
    fresh = build("tied")
    assert overlaps(model) == overlaps(fresh)
    assert [type(module._parameters) for module in model.modules()] == [dict] * len(list(model.modules()))
    assert {key: value for key, value in snapshot(model).items() if key[-1] in ("keys", "dict")} == {
        key: value for key, value in before.items() if key[-1] in ("keys", "dict")
    }


def test_a_second_manager_between_forward_and_backward():
    plain, model = build("residual"), build("residual")
    OffloadTrainingManager(model, "cpu", True)
    losses = [m(inputs(0)).square().mean() for m in (plain, model)]
    second = OffloadTrainingManager(model, "cpu", True)
    for loss in losses:
        loss.backward()
    second.after_backward()
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert_close(mine.grad, other.grad)


@pytest.mark.parametrize("inner_first", [True, False])
def test_overlapping_managers_of_different_models_are_refused(inner_first):
    model = build("residual")
    part = model.blocks[1]
    first, second = (part, model) if inner_first else (model, part)
    manager = OffloadTrainingManager(first, "cpu")
    with pytest.raises(OffloadError, match=type(first).__name__):
        OffloadTrainingManager(second, "cpu")
    assert manager.stats().num_units > 0


def test_managers_of_separate_models_nest_in_one_graph():
    plain_a, plain_b = build("residual"), build("modulated adapter", seed=1)
    a, b = build("residual"), build("modulated adapter", seed=1)
    managers = [OffloadTrainingManager(m, "cpu") for m in (a, b)]

    class Calls(nn.Module):
        def __init__(self, inner) -> None:
            super().__init__()
            self.hidden = [inner]  # not registered: the inner model is managed by its own manager

        def forward(self, x):
            return self.hidden[0](x) * 2

    for outer, inner in ((plain_a, plain_b), (a, b)):
        outer.blocks[2] = Calls(inner)
        outer(inputs(0)).square().mean().backward()
    for manager in managers:
        assert manager.resident_bytes == manager.resident_set_bytes
    for mine, other in zip(
        [*a.parameters(), *b.parameters()], [*plain_a.parameters(), *plain_b.parameters()], strict=True
    ):
        assert (mine.grad is None) == (other.grad is None)
        if other.grad is not None:
            assert_close(mine.grad, other.grad)


@pytest.mark.parametrize("on_host", [False, True])
def test_the_model_is_not_kept_alive(on_host):
    model = build("tied")
    manager = OffloadTrainingManager(model, "cpu", on_host)
    train(model, manager, steps=1)
    alive = weakref.ref(model), weakref.ref(model.blocks[0].weight)
    del model, manager
    gc.collect()
    assert [reference() for reference in alive] == [None, None]


@pytest.mark.parametrize("name", [name for name in CASES if name != "wrapper subclass"])
def test_state_dict_save_and_load_while_offloaded(name):
    plain, model = build(name), build(name)
    with OffloadTrainingManager(model, "cpu", True, 1.0) as manager:
        expected, actual = plain.state_dict(), model.state_dict()
        assert list(actual) == list(expected)
        for key, value in expected.items():
            assert torch.equal(actual[key], value)
            assert actual[key].stride() == value.stride()
        file = io.BytesIO()
        torch.save(actual, file)
        one = io.BytesIO()
        torch.save(model.blocks[0].weight, one)
        assert len(one.getvalue()) < 8 * WIDTH * WIDTH * 4
        file.seek(0)
        loaded = {key: value if value.itemsize == 1 else value + 1 for key, value in torch.load(file).items()}
        if name not in ("views", "tied"):  # adding to aliases one by one means nothing
            model.load_state_dict(loaded)
            plain.load_state_dict(loaded)
        moved = manager.stats().moved_to_target_bytes
        assert moved == 0
        model.eval(), plain.eval()
        with torch.no_grad():
            assert_close(model(inputs(0)), plain(inputs(0)))


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("wrapper subclass", "dataclass")])
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "save"])
def test_copies_of_a_managed_model_are_plain(name, how):
    if name == "parametrized" and how != "deepcopy":
        pytest.skip("parametrized modules refuse to be pickled, with or without offloading")
    if name == "dtypes" and how == "pickle":
        pytest.skip("torch unpickles float8 only through torch.load, with or without offloading")
    model = build(name).eval()
    with torch.no_grad():
        expected = model(inputs(0))
    model = build(name).eval()
    with OffloadTrainingManager(model, "cpu", True):
        if how == "deepcopy":
            copied = copy.deepcopy(model)
        elif how == "pickle":
            copied = pickle.loads(pickle.dumps(model))
        else:
            file = io.BytesIO()
            torch.save(model, file)
            file.seek(0)
            copied = torch.load(file, weights_only=False)
        with torch.no_grad():
            model(inputs(1))
    assert all(
        type(module._parameters) is dict and type(module._buffers) is dict for module in copied.modules()
    )
    assert {p.data_ptr() for p in copied.parameters()}.isdisjoint(p.data_ptr() for p in model.parameters())
    with torch.no_grad():
        assert_close(copied(inputs(0)), expected)
    train(copied.train(), steps=1)


def test_a_construction_that_fails_leaves_the_model_alone(monkeypatch):
    from comfyui_ferry.core.offload import pinned_arena

    model = build("tied")
    before = snapshot(model)

    def fail(self):
        raise OffloadError("no memory")

    monkeypatch.setattr(pinned_arena.PinnedArena, "seal", fail)
    with pytest.raises(OffloadError, match="no memory"):
        OffloadTrainingManager(model, "cpu", True)
    assert snapshot(model) == before


def test_inference_tensors_come_back_as_they_were():
    with torch.inference_mode():
        torch.manual_seed(0)
        model = Stack(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)).requires_grad_(False).eval()
    plain = Stack(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)).requires_grad_(False).eval()
    plain.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
    before = snapshot(model)
    with OffloadTrainingManager(model, "cpu") as manager:
        for m in (plain, model):
            x = inputs(0)
            m(x).square().mean().backward()
            m.input_gradient = x.grad
        assert_close(model.input_gradient, plain.input_gradient)
        assert manager.resident_bytes == 0
        del model.input_gradient
    assert snapshot(model) == before
