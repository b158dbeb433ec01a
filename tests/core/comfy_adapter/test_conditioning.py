from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

pytestmark = pytest.mark.comfy


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty models/conditioning that ComfyUI knows."""
    import folder_paths

    models = tmp_path / "models"
    monkeypatch.setattr(folder_paths, "models_dir", str(models))
    monkeypatch.delitem(folder_paths.folder_names_and_paths, "conditioning", raising=False)
    monkeypatch.setattr(folder_paths, "filename_list_cache", {})
    from comfyui_ferry.core.comfy_adapter import register_conditioning_folder

    register_conditioning_folder()
    (models / "conditioning").mkdir(parents=True)
    return models / "conditioning"


def prompt(**values):
    return [[torch.randn(1, 7, 16), values]]


def test_round_trip_keeps_every_tensor_and_plain_value(folder: Path) -> None:
    from comfyui_ferry.core.comfy_adapter import conditioning_files, load_conditioning, save_conditioning

    values = {"pooled_output": torch.randn(1, 8).bfloat16(), "guidance": 3.5, "text": "a cat", "none": None}
    values["attention_mask"] = torch.ones(1, 7, dtype=torch.int64)
    conditioning = prompt(**values)
    assert save_conditioning(conditioning, "cats/one") == folder / "cats" / "one.safetensors"
    assert conditioning_files() == ["cats/one.safetensors"]
    ((cond, loaded),) = load_conditioning("cats/one.safetensors")
    assert torch.equal(cond, conditioning[0][0])
    assert loaded.keys() == values.keys()
    for key, value in values.items():
        same = torch.equal(loaded[key], value) if isinstance(value, torch.Tensor) else loaded[key] == value
        assert same, key
    assert loaded["pooled_output"].dtype == torch.bfloat16


def test_a_view_is_saved_without_the_rest_of_its_storage(folder: Path) -> None:
    from comfyui_ferry.core.comfy_adapter import save_conditioning

    large = torch.randn(1, 7, 4096)
    path = save_conditioning([[large[:, :, :16], {}]], "view")
    assert path.stat().st_size < 2000


def test_the_version_text_changes_with_the_file(folder: Path) -> None:
    from comfyui_ferry.core.comfy_adapter import conditioning_version, save_conditioning

    save_conditioning(prompt(), "one")
    first = conditioning_version("one.safetensors")
    save_conditioning(prompt(pooled_output=torch.zeros(1, 4)), "one", overwrite=True)
    assert conditioning_version("one.safetensors") != first


@pytest.mark.parametrize("name", ["../outside", "a/../../outside", "/outside", "", "folder/"])
def test_names_that_leave_the_folder_or_name_no_file_are_refused(folder: Path, name: str) -> None:
    from comfyui_ferry.core.comfy_adapter import RequestError, save_conditioning

    with pytest.raises(RequestError, match="file name"):
        save_conditioning(prompt(), name)
    assert [path for path in folder.parent.parent.rglob("*") if path.is_file()] == []


def test_loading_a_name_outside_the_folder_is_refused(folder: Path) -> None:
    from comfyui_ferry.core.comfy_adapter import RequestError, load_conditioning

    save_file({"cond": torch.zeros(1, 1, 1)}, folder.parent / "secret.safetensors")
    with pytest.raises(RequestError, match="stay inside"):
        load_conditioning("../secret.safetensors")


def test_an_existing_file_is_only_replaced_when_asked(folder: Path) -> None:
    from comfyui_ferry.core.comfy_adapter import RequestError, load_conditioning, save_conditioning

    first, second = prompt(), prompt()
    save_conditioning(first, "one")
    with pytest.raises(RequestError, match="overwrite"):
        save_conditioning(second, "one")
    assert torch.equal(load_conditioning("one.safetensors")[0][0], first[0][0])
    save_conditioning(second, "one", overwrite=True)
    assert torch.equal(load_conditioning("one.safetensors")[0][0], second[0][0])


@pytest.mark.parametrize(
    ("conditioning", "named"),
    [
        (prompt() + prompt(), "2 entries"),
        ([], "0 entries"),
        (prompt(reference_latents=[torch.zeros(1)]), "reference_latents"),
        (prompt(control=object()), "control"),
        ([[torch.zeros(7, 16), {}]], r"\(7, 16\)"),
        ([[torch.zeros(1, 0, 16), {}]], r"\(1, 0, 16\)"),
        ([[torch.full((1, 2, 3), float("nan")), {}]], "NaN"),
    ],
)
def test_what_a_file_cannot_hold_is_refused_and_nothing_is_written(
    folder: Path, conditioning, named: str
) -> None:
    from comfyui_ferry.core.comfy_adapter import RequestError, save_conditioning

    with pytest.raises(RequestError, match=named):
        save_conditioning(conditioning, "one")
    assert list(folder.iterdir()) == []


GOOD = {"format": "comfyui_ferry.conditioning", "version": "1", "values": "{}"}


@pytest.mark.parametrize(
    ("tensors", "metadata", "named"),
    [
        ({"conditioning": torch.zeros(1, 2, 3)}, GOOD, "'conditioning'"),
        ({"cond": torch.zeros(2, 3)}, GOOD, r"\(2, 3\)"),
        ({"cond": torch.zeros(1, 2, 3)}, GOOD | {"version": "2"}, "'2'"),
        ({"cond": torch.zeros(1, 2, 3)}, {}, "None"),
    ],
)
def test_a_file_that_is_no_conditioning_is_refused(folder: Path, tensors, metadata, named: str) -> None:
    from comfyui_ferry.core.comfy_adapter import RequestError, load_conditioning

    save_file(tensors, folder / "one.safetensors", metadata)
    with pytest.raises(RequestError, match=named):
        load_conditioning("one.safetensors")


def test_a_damaged_or_missing_file_is_refused(folder: Path) -> None:
    from comfyui_ferry.core.comfy_adapter import RequestError, load_conditioning, save_conditioning

    path = save_conditioning(prompt(), "one")
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(RequestError, match="cannot be read"):
        load_conditioning("one.safetensors")
    with pytest.raises(RequestError, match=r"no conditioning file 'two\.safetensors'"):
        load_conditioning("two.safetensors")


def test_a_failed_write_leaves_the_old_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from comfyui_ferry.core.comfy_adapter import conditioning, load_conditioning, save_conditioning

    first = prompt()
    save_conditioning(first, "one")

    def fail(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(conditioning, "save_file", fail)
    with pytest.raises(OSError, match="no space"):
        save_conditioning(prompt(), "one", overwrite=True)
    assert [path.name for path in folder.iterdir()] == ["one.safetensors"]
    assert torch.equal(load_conditioning("one.safetensors")[0][0], first[0][0])


def test_values_are_json_not_pickle(folder: Path) -> None:
    from comfyui_ferry.core.comfy_adapter import save_conditioning
    from safetensors import safe_open

    with safe_open(save_conditioning(prompt(guidance=2.0), "one"), framework="pt") as file:
        assert json.loads(file.metadata()["values"]) == {"guidance": 2.0}
