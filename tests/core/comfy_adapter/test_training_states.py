"""States lie in the output folder, are listed, found and cleared away, and never touch another run's."""

from __future__ import annotations

import os
import shutil

import pytest
from comfyui_ferry.core.errors import RequestError, SaveError
from comfyui_ferry.core.training import TrainingState
from comfyui_ferry.core.training.trained_weights import WeightsState

pytestmark = [pytest.mark.comfy, pytest.mark.timeout(120)]


@pytest.fixture
def states(tmp_path, monkeypatch):
    import folder_paths
    from comfyui_ferry.core.comfy_adapter import training_states

    monkeypatch.setattr(folder_paths, "output_directory", str(tmp_path))
    return training_states


def at(step):
    return TrainingState(step, step, [0.5] * step, WeightsState({}, {}, {}), [])


def test_a_run_keeps_its_newest_and_leaves_other_runs_alone(states):
    first, second = (states.RunStates("a/b", keep=2) for _ in range(2))
    first.save(at(1))
    for step in (1, 2, 3):
        second.save(at(step))
    assert second.save(at(3)) == second.last and second.last.name == "step_00000003.safetensors"
    assert set(states.state_names()) == {
        "a/b_00001/step_00000001.safetensors",
        "a/b_00002/step_00000002.safetensors",
        "a/b_00002/step_00000003.safetensors",
    }
    states.RunStates("a/b_c", keep=1).save(at(9))  # another prefix, newer
    assert states.find_state("latest", prefix="a/b").name == "step_00000003.safetensors"
    assert states.resume_choices()[:2] == ["none", "latest"]
    assert states.find_state("none", prefix="a/b") is None
    assert states.find_state("a/b_00001/step_00000001.safetensors", prefix="").is_file()
    assert states.resume_version("latest", "a/b") != states.resume_version("latest", "a/b_c")


def test_a_state_that_goes_while_they_are_listed_is_left_out(states, monkeypatch):
    """A training in another thread has just replaced it."""
    states.RunStates("a", keep=1).save(at(1))
    walk = os.walk
    monkeypatch.setattr(
        states.os,
        "walk",
        lambda root: [(folder, sub, [*names, "gone.safetensors"]) for folder, sub, names in walk(root)],
    )
    assert states.state_names() == ["a_00001/step_00000001.safetensors"]


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs Linux to see what is synced")
def test_a_state_and_all_folders_above_it_are_brought_to_the_disk(states, tmp_path, monkeypatch):
    """Whatever loses power afterwards."""
    run = states.RunStates("a/b", keep=1)
    synced, fsync = [], os.fsync

    def note(descriptor):
        fsync(descriptor)
        synced.append(os.path.realpath(f"/proc/self/fd/{descriptor}"))

    monkeypatch.setattr(os, "fsync", note)
    run.save(at(1))
    folder = tmp_path / "training_states" / "a" / "b_00001"
    for path in (folder, folder.parent, folder.parent.parent, tmp_path):
        assert str(path) in synced
    assert any(name.startswith(f"{folder}/.step_00000001") for name in synced)


def test_nothing_is_written_without_a_prefix_or_with_none_to_keep(states, tmp_path):
    assert states.RunStates("", keep=2).save(at(1)) is None
    assert states.RunStates("a", keep=0).save(at(1)) is None
    assert os.listdir(tmp_path) == []


def test_a_failed_save_leaves_the_older_state(states, monkeypatch):
    run = states.RunStates("a", keep=1)
    run.save(at(1))

    def fail(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(SaveError):
        run.save(at(2))
    assert states.state_names() == ["a_00001/step_00000001.safetensors"]


def test_an_older_state_that_cannot_be_removed_is_named_and_a_lost_folder_is_made_anew(states, monkeypatch):
    run = states.RunStates("a", keep=1)
    run.save(at(1))
    with monkeypatch.context() as patch:
        patch.setattr(states.Path, "unlink", refuse_old)
        with pytest.raises(SaveError, match=r"newest state is saved.*step_00000001"):
            run.save(at(2))
    assert len(states.state_names()) == 2
    shutil.rmtree(run.last.parent)
    run.save(at(3))
    assert states.state_names() == ["a_00001/step_00000003.safetensors"]


def refuse_old(path, missing_ok=False):
    if path.name == "step_00000001.safetensors":
        raise PermissionError(1, "Operation not permitted")


def test_a_prefix_is_found_again_however_it_is_written(states):
    states.RunStates("./a//b/", keep=1).save(at(1))
    assert states.find_state("latest", prefix="a/b") == states.find_state("latest", prefix="./a//b/")


@pytest.mark.parametrize("name", ["latest", "../secret.safetensors", "/etc/passwd", "x/y.safetensors"])
def test_what_is_not_listed_is_not_read(states, tmp_path, name):
    (tmp_path / "secret.safetensors").write_bytes(b"x")
    with pytest.raises(RequestError, match="resume_from="):
        states.find_state(name, prefix="a")


def test_a_link_out_of_the_folder_is_not_listed(states, tmp_path):
    (tmp_path / "training_states").mkdir()
    (tmp_path / "secret.safetensors").write_bytes(b"x")
    (tmp_path / "training_states" / "link.safetensors").symlink_to(tmp_path / "secret.safetensors")
    assert states.state_names() == []
