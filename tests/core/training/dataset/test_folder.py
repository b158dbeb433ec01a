"""A folder is read whole, checked whole, and never left."""

from __future__ import annotations

import os

import pytest
import torch
from comfyui_ferry.core.errors import RequestError
from comfyui_ferry.core.training.dataset import (
    Bucket,
    FolderOptions,
    folder_version,
    join_sets,
    load_training_folder,
    order_folders,
    plain_examples,
    read_pixels,
)
from PIL import Image

SMALL = {"resolution_px": 64, "step_px": 16}


def put(folder, name, size=(64, 64), caption="a caption", colour=(200, 100, 50)):
    folder.mkdir(parents=True, exist_ok=True)
    image = Image.new("RGB", size, colour)
    image.paste((0, 0, 0), (0, 0, size[0] // 2, size[1]))
    image.save(folder / name)
    if caption is not None:
        (folder / name).with_suffix(".txt").write_text(caption, encoding="utf-8")


def load(root, name="cats", **options):
    return load_training_folder(root, name, FolderOptions(**(SMALL | options)))


def test_folders_that_look_like_training_data_come_first(tmp_path):
    root = tmp_path / "input"
    put(root / "cats", "a.png")
    put(root / "birds", "a.png", caption=None)
    put(tmp_path / "outside", "a.png")
    (root / "3d").mkdir()
    (root / "ants").symlink_to(tmp_path / "outside")
    assert order_folders(root, ["3d", "ants", "birds", "cats"]) == ["cats", "birds", "3d", "ants"]


def test_pictures_get_their_own_captions_and_buckets(tmp_path):
    put(tmp_path / "cats", "b.png", (64, 64), "  second \n")
    put(tmp_path / "cats", "a.jpg", (128, 64), "\ufefffirst, ünïcode")
    put(tmp_path / "cats" / "inner", "c.png")
    (tmp_path / "cats" / "notes.json").write_text("{}")
    found = load(tmp_path, repeats=3)
    assert [(item.name, item.caption, item.bucket) for item in found.items] == [
        ("cats/a.jpg", "first, ünïcode", Bucket(80, 48)),
        ("cats/b.png", "second", Bucket(64, 64)),
    ]
    assert len(found) == 6
    assert found.summary() == "2 files, 6 samples an epoch: 1 at 64x64, 1 at 80x48"
    assert found == load(tmp_path, repeats=3)
    assert read_pixels(found.items[0]).shape == (1, 48, 80, 3)


def test_mirrored_pictures_come_beside_their_originals(tmp_path):
    put(tmp_path / "cats", "a.png")
    first, second = load(tmp_path, mirror=True).items
    assert torch.equal(read_pixels(second), read_pixels(first).flip(2))
    assert not torch.equal(read_pixels(second), read_pixels(first))


def test_every_offender_is_named_in_one_error(tmp_path):
    folder = tmp_path / "cats"
    put(folder, "good.png")
    put(folder, "twice.png")
    put(folder, "twice.jpg")
    put(folder, "bare.png", caption=None)
    put(folder, "blank.png", caption="  \n")
    put(folder, "tiny.png", (20, 20))
    put(folder, "long.png", (640, 64))
    put(folder, "latin.png")
    (folder / "latin.txt").write_bytes(b"caf\xe9")
    put(folder, "wide.png")
    (folder / "wide.txt").write_bytes("a cat".encode("utf-16-le"))
    put(folder, "both.png")
    (folder / "both.TXT").write_text("another")
    for name in ("scan.jfif", "raw.NEF", "old.wmv"):
        put(folder, name.split(".")[0] + ".png")
        (folder / (name.split(".")[0] + ".png")).unlink()
        (folder / name).write_bytes(b"what no decoder here knows")
    (folder / "broken.png").write_bytes(b"\x89PNG\r\n")
    (folder / "broken.txt").write_text("x")
    (folder / "clip.mp4").write_bytes(b"no video")
    (folder / "alone.txt").write_text("x")
    (tmp_path.parent / "outside.png").write_bytes((folder / "good.png").read_bytes())
    (folder / "link.png").symlink_to(tmp_path.parent / "outside.png")
    (folder / "link.txt").write_text("x")
    (folder / "dead.png").symlink_to(folder / "nothing.png")
    with pytest.raises(RequestError) as caught:
        load(tmp_path)
    lines = {line.split()[0]: line for line in str(caught.value).splitlines()[1:-1]}
    for name, reason in {
        "twice.png": "same name as twice.jpg",
        "twice.jpg": "same name as twice.png",
        "bare.png": ".txt file is missing",
        "blank.png": ".txt file is empty",
        "tiny.png": "too small: 20x20 would be enlarged 3.20 times",
        "long.png": "longer than 4:1",
        "latin.png": "latin.txt) that is not UTF-8",
        "wide.png": "wide.txt) that is not UTF-8",
        "both.TXT": "second caption beside both.txt",
        "scan.jfif": "cannot be read",
        "raw.NEF": "cannot be read",
        "old.wmv": "cannot be read",
        "broken.png": "cannot be read",
        "clip.mp4": "cannot be read",
        "alone.txt": "caption without a picture",
        "link.png": "leads out of",
        "dead.png": "is not a file",
    }.items():
        assert reason in lines.pop(name)
    assert lines == {}
    assert "17 files" in str(caught.value)
    # Both faults of one file are told at once.
    assert "no caption" in str(caught.value).split("clip.mp4")[1].splitlines()[0]


def test_a_default_caption_stands_in_for_missing_ones(tmp_path):
    put(tmp_path / "cats", "a.png", caption=None)
    put(tmp_path / "cats", "b.png", caption="own")
    assert [item.caption for item in load(tmp_path, default_caption="sks").items] == ["sks", "own"]


def test_only_folders_inside_the_root_are_read(tmp_path):
    root = tmp_path / "input"
    put(root / "cats" / "deep", "a.png")
    put(tmp_path / "secret", "a.png")
    (root / "way_out").symlink_to(tmp_path / "secret")
    (root / "file.png").write_bytes(b"")
    for name in (
        "../secret",
        "cats/../../secret",
        str(tmp_path / "secret"),
        "way_out",
        "",
        ".",
        "C:\\x",
        "a\0",
    ):
        with pytest.raises(RequestError, match="inside ComfyUI's input folder only"):
            load(root, name)
    for name in ("nothing", "file.png", "a" * 300):
        with pytest.raises(RequestError, match="no such folder"):
            load(root, name)
    with pytest.raises(RequestError, match="no pictures"):
        load(root, "cats")
    assert len(load(root, "cats/deep")) == 1


def test_the_version_follows_the_files(tmp_path):
    put(tmp_path / "cats", "a.png")
    before = folder_version(tmp_path, "cats")
    assert folder_version(tmp_path, "cats") == before
    os.utime(tmp_path / "cats" / "a.txt", ns=(1, 1))
    assert folder_version(tmp_path, "cats") != before


def test_a_file_changed_after_loading_is_refused(tmp_path):
    put(tmp_path / "cats", "a.png")
    (item,) = load(tmp_path).items
    put(tmp_path / "cats", "a.png", colour=(1, 2, 3))
    with pytest.raises(RequestError, match=r"cats/a.png is not what it was"):
        read_pixels(item)


def test_plain_examples_repeat_and_drop_captions_by_the_seed(tmp_path):
    for index in range(3):
        put(tmp_path / "cats", f"{index}.png", caption=f"cat {index}")
    found = join_sets(load(tmp_path, repeats=40, caption_dropout=0.5), None)
    captions = [caption for _, caption in plain_examples(found, seed=1)]
    assert len(captions) == 120
    assert set(captions) == {"", "cat 0", "cat 1", "cat 2"}
    assert 30 < captions.count("") < 90
    assert captions == [caption for _, caption in plain_examples(found, seed=1)]
    assert captions != [caption for _, caption in plain_examples(found, seed=2)]


@pytest.mark.parametrize("options", [{"repeats": 0}, {"caption_dropout": 1.5}, {"max_upscale": 0.5}])
def test_options_out_of_range_are_refused(options):
    with pytest.raises(RequestError, match=next(iter(options))):
        FolderOptions(**options)


def test_control_pictures_belong_to_the_picture_of_their_name(tmp_path):
    put(tmp_path / "after", "a.png", colour=(1, 2, 3))
    put(tmp_path / "after", "b.png")
    put(tmp_path / "before", "a.jpg", (128, 64), None)
    put(tmp_path / "before", "b.png", caption="captions here are not read")
    found = load(tmp_path, "after", control_folder="before", mirror=True, repeats=2, caption_dropout=0.5)
    assert [(item.name, item.control.name, item.control.bucket) for item in found.items[::2]] == [
        ("after/a.png", "before/a.jpg", Bucket(80, 48)),
        ("after/b.png", "before/b.png", Bucket(64, 64)),
    ]
    plain, mirrored = found.items[:2]
    assert torch.equal(read_pixels(mirrored.control), read_pixels(plain.control).flip(2))
    assert found.summary().endswith(", 4 with a control picture")
    with pytest.raises(RequestError, match=r"after/a.png has a control picture"):
        list(plain_examples(found, seed=0))


def test_everything_wrong_with_control_pictures_is_named(tmp_path):
    for name in ("a", "b", "c", "d"):
        put(tmp_path / "after", f"{name}.png")
    put(tmp_path / "before", "a.png", (8, 8))
    put(tmp_path / "before", "x.png")
    (tmp_path / "before" / "b.png").write_text("no picture")
    (tmp_path / "before" / "c.mp4").write_text("")
    with pytest.raises(RequestError) as caught:
        load(tmp_path, "after", control_folder="before")
    lines = str(caught.value).splitlines()
    assert sum("a.png has a control picture (a.png) that is too small" in line for line in lines) == 1
    assert sum("b.png has a control picture (b.png) that cannot be read" in line for line in lines) == 1
    assert sum("before/c.mp4 is a video" in line for line in lines) == 1
    assert sum(line.startswith("d.png has no control picture in before") for line in lines) == 1
    assert sum("before/x.png is a control picture without a picture" in line for line in lines) == 1
    for folder, named in (("after", "of themselves"), ("../after", "'..'"), ("none", "no such folder")):
        with pytest.raises(RequestError, match=named):
            load(tmp_path, "after", control_folder=folder)
