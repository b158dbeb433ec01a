"""Files stay in the output folder, and only what ComfyUI's loader takes whole is kept."""

from __future__ import annotations

import os

import pytest
import torch
from comfyui_ferry.core.errors import RequestError, SaveError
from ferry_support.tiny_patchers import PATCHERS

pytestmark = pytest.mark.comfy


@pytest.fixture(scope="module")
def model():
    return PATCHERS["wan"].build()


@pytest.fixture
def output(tmp_path, monkeypatch):
    import folder_paths

    monkeypatch.setattr(folder_paths, "output_directory", str(tmp_path / "output"))
    (tmp_path / "output").mkdir()
    return tmp_path / "output"


def lora(model):
    from comfyui_ferry.core.training import LoraAdapters, LoraConfig, select_targets

    targets = select_targets(model.model.diffusion_model)
    adapters = LoraAdapters(targets, LoraConfig(rank=2), seed=0, device="cpu")
    for adapter in adapters.adapters().values():
        torch.nn.init.normal_(adapter.lora_up)
    return adapters.state_dict(prefix="diffusion_model.", dtype=torch.float32)


def save(model, tensors, prefix):
    from comfyui_ferry.core.comfy_adapter.lora_files import save_lora

    return save_lora(model, tensors, prefix=prefix, metadata={"format": "pt"})


@pytest.mark.parametrize(
    "prefix",
    [
        "../evil",
        "loras/../../evil",
        "/tmp/evil",
        "..",
        ".",
        "loras/",
        "",
        "  ",
        "../output/x",
        "a/../../output/x",
    ],
)
def test_a_prefix_outside_is_refused(output, prefix):
    from comfyui_ferry.core.comfy_adapter.lora_files import check_prefix

    with pytest.raises(RequestError, match="output folder"):
        check_prefix(prefix)
    assert os.listdir(output.parent) == ["output"]


def test_a_link_that_leads_outside_is_refused(output):
    from comfyui_ferry.core.comfy_adapter.lora_files import check_prefix

    (output / "link").symlink_to(output.parent)
    with pytest.raises(RequestError):
        check_prefix("link/lora")


def test_files_are_numbered_as_the_stock_node_does(output, model):
    from comfyui_ferry.core.comfy_adapter.lora_files import check_prefix

    check_prefix("loras/mine")
    paths = [save(model, lora(model), "loras/mine") for _ in range(2)]
    assert [path.relative_to(output).as_posix() for path in paths] == [
        "loras/mine_00001_.safetensors",
        "loras/mine_00002_.safetensors",
    ]
    assert sorted(os.listdir(output / "loras")) == [path.name for path in paths]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda key: key.replace("diffusion_model.", ""), "would skip"),
        (lambda key: key.replace("blocks.0", "blocks.77"), "would skip"),
        (lambda key: key.replace("lora_up", "lora_A.default"), "would skip"),
    ],
)
def test_keys_that_the_loader_skips_are_refused(output, model, change, message):
    tensors = lora(model)
    renamed = {change(key): value for key, value in tensors.items()}
    with pytest.raises(SaveError, match=message):
        save(model, renamed, "mine")
    assert os.listdir(output) == []


def test_one_adapter_without_effect_is_refused(output, model):
    tensors = lora(model)
    tensors["diffusion_model.blocks.1.ffn.0.lora_up.weight"].zero_()
    with pytest.raises(SaveError, match=r"1 adapters are still all zero .*blocks\.1\.ffn\.0"):
        save(model, tensors, "mine")
    assert os.listdir(output) == []


def test_a_file_that_reads_back_differently_is_removed(output, model, monkeypatch):
    import comfy.utils

    tensors = lora(model)
    key = "diffusion_model.blocks.1.ffn.0.lora_up.weight"
    monkeypatch.setattr(
        comfy.utils, "load_torch_file", lambda path, **options: tensors | {key: tensors[key] + 1}
    )
    with pytest.raises(SaveError, match="reads back with other values"):
        save(model, tensors, "mine")
    assert os.listdir(output) == []
