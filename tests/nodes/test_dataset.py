"""The dataset nodes inside ComfyUI's input folder."""

from __future__ import annotations

import pytest
import torch
from comfyui_ferry.core.errors import RequestError
from PIL import Image

pytestmark = [pytest.mark.comfy, pytest.mark.timeout(120)]


@pytest.fixture
def pictures(tmp_path, monkeypatch):
    """An input folder with the folder `cats`: a wide and a tall picture."""
    import folder_paths

    monkeypatch.setattr(folder_paths, "input_directory", str(tmp_path))
    folder = tmp_path / "cats"
    folder.mkdir()
    for name, size in (("a", (160, 80)), ("b", (80, 160))):
        Image.new("RGB", size, (255, 0, 0)).save(folder / f"{name}.png")
        (folder / f"{name}.txt").write_text(f"cat {name}")
    return folder


def load(folder="cats", **settings):
    from comfyui_ferry.nodes.dataset import LoadTrainingFolder

    defaults = {
        entry.id: entry.default
        for entry in LoadTrainingFolder.define_schema().inputs
        if getattr(entry, "default", None) is not None
    }
    return LoadTrainingFolder.execute(**(defaults | {"folder": folder, "resolution": 64} | settings))


def test_a_folder_becomes_images_and_captions_in_their_buckets(pictures):
    from comfyui_ferry.nodes.dataset import LoadTrainingFolder, TrainingSetImages

    schema = LoadTrainingFolder.GET_SCHEMA()
    assert schema.inputs[0].options == ["cats"]
    result = load(model_family="FLUX.1-dev", resolution=96, repeats=2, before=load().args[0])
    (found,) = result.args
    assert "2 files, 6 samples" in result.ui.as_dict()["text"][0]
    with pytest.raises(RequestError, match="model_family='nope'"):
        load(model_family="nope")
    images, captions = TrainingSetImages.execute(found, seed=0).args
    assert captions == ["cat a", "cat b", *["cat a"] * 2, *["cat b"] * 2]
    assert [tuple(image.shape) for image in images] == [
        (1, 64, 64, 3),
        (1, 64, 64, 3),
        *[(1, 64, 128, 3)] * 2,
        *[(1, 128, 64, 3)] * 2,
    ]
    # Scaling sums weights that add up to 1 within rounding.
    torch.testing.assert_close(images[2], torch.tensor([1.0, 0.0, 0.0]).expand(1, 64, 128, 3))


def test_the_node_runs_again_when_a_file_changes(pictures):
    from comfyui_ferry.nodes.dataset import LoadTrainingFolder

    before = LoadTrainingFolder.fingerprint_inputs(folder="cats", resolution=64)
    (pictures / "a.txt").write_text("another caption")
    assert LoadTrainingFolder.fingerprint_inputs(folder="cats", resolution=64) != before


def test_other_folders_are_refused(pictures):
    for folder in ("../cats", str(pictures)):
        with pytest.raises(RequestError, match="inside ComfyUI's input folder only"):
            load(folder)
