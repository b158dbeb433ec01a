"""The training node among ComfyUI's own nodes."""

from __future__ import annotations

import asyncio
import inspect
import os

import pytest
import torch
from comfyui_ferry.core.errors import RequestError
from ferry_support.tiny_models import noise
from ferry_support.tiny_patchers import PATCHERS, TRAINABLE

pytestmark = [pytest.mark.comfy, pytest.mark.timeout(300)]

WAN = PATCHERS["wan"]


def node():
    from comfyui_ferry.nodes.training import TrainLoraOffload

    return TrainLoraOffload


def defaults():
    return {
        entry.id: entry.default
        for entry in node().define_schema().inputs
        if hasattr(entry, "default")  # the others are sockets
    }


def run(model, latents=None, positive=None, **widgets):
    """Execute the node as ComfyUI does: in inference mode, every input a list."""
    values = defaults() | {"steps": 3, "learning_rate": 1e-2, "rank": 4, "alpha": 4.0, "save_prefix": ""}
    values |= widgets
    with torch.inference_mode():
        return node().execute(
            model=[model], latents=latents or [WAN.latent(0, 2)],
            positive=positive or [WAN.caption(0), WAN.caption(1)],
            **{name: [value] for name, value in values.items()},
        )  # fmt: skip


def stock(name):
    import comfy_extras.nodes_train as module

    return getattr(module, name)


def sample(model, seed=0):
    import nodes

    with torch.inference_mode():
        latent = {"samples": torch.zeros(1, *WAN.latent_shape)}
        return nodes.common_ksampler(
            model, seed, 2, 1.0, "euler", "simple", WAN.caption(0), WAN.caption(1), latent
        )[0]["samples"]


def test_the_schema_is_valid_and_its_defaults_are_in_range():
    schema = node().GET_SCHEMA()  # finalizes and validates
    assert schema.is_input_list is True
    for entry in schema.inputs:
        assert entry.tooltip
        if getattr(entry, "min", None) is not None:
            assert entry.min <= entry.default <= entry.max
        if getattr(entry, "options", None):
            assert entry.default in entry.options


def test_every_input_is_read():
    from comfyui_ferry.core.comfy_adapter import TrainingRequest, fill_auto

    source = inspect.getsource(TrainingRequest.from_widgets)
    read = {name for name in defaults() if f'widgets["{name}"]' in source}
    assert defaults().keys() - read == {"noise_range"}
    assert 'values["noise_range"]' in inspect.getsource(fill_auto)


def test_outputs_have_the_types_of_the_stock_node():
    ours = [entry.io_type for entry in node().define_schema().outputs]
    theirs = [entry.io_type for entry in stock("TrainLoraNode").define_schema().outputs]
    assert ours == theirs[-3:]  # 0.3.75 also returns the MODEL, first
    assert ours == ["LORA_MODEL", "LOSS_MAP", "INT"]


@pytest.mark.parametrize("kind", TRAINABLE)
def test_the_stock_loader_applies_it(kind):
    tiny = PATCHERS[kind]
    model = tiny.build()
    lora, _, _ = run(
        model, [tiny.latent(0, 2)], [tiny.caption(0), tiny.caption(1)], rank=2, alpha=4.0, lora_dtype="fp32"
    ).args
    loader = stock("LoraModelLoader")
    with torch.inference_mode():
        patched = loader.execute(model, lora, 1.0).args[0]
    assert len(patched.patches) == len(lora) // 3
    network = model.model
    before = {name: value.clone() for name, value in network.state_dict().items()}
    with torch.inference_mode():
        patched.patch_model(device_to=torch.device("cpu"))
        for name in patched.patches:
            up, down = (lora[name.replace(".weight", f".lora_{half}.weight")] for half in ("up", "down"))
            # scale = alpha / rank = 2; ComfyUI merges in fp32.
            expected = before[name] + 2.0 * up @ down
            torch.testing.assert_close(network.state_dict()[name], expected, rtol=1e-4, atol=1e-5)
        patched.unpatch_model(torch.device("cpu"))


def test_it_changes_what_is_sampled():
    model = WAN.build()
    lora, _, _ = run(model).args
    plain = sample(model)
    with torch.inference_mode():
        patched = stock("LoraModelLoader").execute(model, lora, 1.0).args[0]
    assert not torch.allclose(sample(patched), plain, rtol=1e-3, atol=1e-3)
    assert torch.equal(sample(model), plain)


def test_the_stock_nodes_save_and_draw_it(output, monkeypatch):
    import comfy.utils

    lora, loss_map, steps = run(WAN.build(), steps=2).args
    stock("SaveLoRA").execute(lora, "loras/mine", steps)
    (name,) = os.listdir(output / "loras")
    assert name == "mine_2_steps_00001_.safetensors"
    assert comfy.utils.load_torch_file(str(output / "loras" / name)).keys() == lora.keys()
    assert steps == 2
    assert len(loss_map["loss"]) == 2


@pytest.mark.parametrize("steps", [1, 2])
def test_the_stock_loss_graph_draws_any_number_of_steps(steps, monkeypatch):
    graph = stock("LossGraphNode")
    _, loss_map, _ = run(WAN.build(), steps=steps).args
    monkeypatch.setattr(f"{graph.__module__}.ui.PreviewImage", lambda image, cls=None: image)
    drawn = graph.execute(loss_map, "loss")
    assert drawn.ui.shape[0] == 1


def test_its_own_file_is_the_lora(output):
    import comfy.utils

    result = run(WAN.build(), save_prefix="loras/own")
    lora, _, _ = result.args
    loaded = comfy.utils.load_torch_file(str(output / "loras" / "own_00001_.safetensors"))
    assert all(torch.equal(loaded[name], value) for name, value in lora.items())
    assert "own_00001_.safetensors" in result.ui.as_dict()["text"][0]


def test_it_saves_nothing_without_a_prefix(output):
    run(WAN.build(), save_prefix="")
    assert os.listdir(output) == []


@pytest.mark.parametrize("widgets", [{"steps": 0}, {"optimizer": "x"}, {"targets": "-blocks"}])
def test_a_bad_value_is_refused(widgets, output):
    with pytest.raises(RequestError):
        run(WAN.build(), save_prefix="x", **widgets)
    assert os.listdir(output) == []


def test_a_value_of_another_kind_which_a_link_may_bring_is_refused_by_name():
    from comfyui_ferry.core.comfy_adapter import TrainingRequest, fill_auto

    model, good = WAN.build(), defaults()
    for name, default in good.items():
        for value in (None, [], {}, "", "x", 7, -3.5, True, float("nan"), 10**400, b"x"):
            same_kind = type(value) is type(default) or (isinstance(default, float) and value == 7)
            # Of these texts one is a path or pattern, checked later, and "" none.
            is_free_text = name in ("save_prefix", "resume_from", "targets") and isinstance(value, str)
            if is_free_text or (same_kind and not isinstance(value, str | float)):
                continue
            with pytest.raises(RequestError, match=name):
                filled = fill_auto(model, good | {name: value})
                TrainingRequest.from_widgets(filled.values)


def test_list_inputs_are_those_of_the_stock_dataset_nodes():
    model = WAN.build()
    first = run(model, [{"samples": noise(2, *WAN.latent_shape)}], [WAN.caption(0), WAN.caption(1)])
    rows = [{"samples": row[None]} for row in noise(2, *WAN.latent_shape)]
    second = run(model, rows, [[WAN.caption(0)[0], WAN.caption(1)[0]]])
    assert first.args[1] == second.args[1]


def test_the_pack_offers_it():
    from comfyui_ferry.nodes.extension import FerryExtension

    if not any(entry is node() for entry in asyncio.run(FerryExtension().get_node_list())):
        pytest.fail("TrainLoraOffload is missing in nodes/extension.py")
