"""Where training states lie, under which names people choose them, and which are kept.

``<output>/training_states/<prefix>_00001/step_00000100.safetensors``: one folder for each run. A new
state is complete on the disk before an older one of the same run goes; states of other runs are never
touched.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import folder_paths

from ..errors import RequestError, SaveError
from ..training import TrainingState, save_state, sync_folder
from .training_request import NO_RESUME, RESUME_LATEST

_FOLDER = "training_states"
_SUFFIX = ".safetensors"
# Of trainings of this process, by the version of their last state.
_BEGAN_FROM: dict[str, str] = {}


def states_folder() -> Path:
    """Return the folder of all states; it may not exist yet."""
    return Path(folder_paths.get_output_directory()).resolve() / _FOLDER


def state_names() -> list[str]:
    """Return the names of all states, newest first, relative to their folder with ``/`` between."""
    root = states_folder()
    # Links are not followed, so that nothing outside of ComfyUI's folder is listed.
    paths = [
        Path(folder) / name
        for folder, _, names in os.walk(root)
        for name in names
        if name.endswith(_SUFFIX) and not name.startswith(".") and not (Path(folder) / name).is_symlink()
    ]
    dated = sorted(((_written_at(path), path.name, path) for path in paths), reverse=True)
    return [path.relative_to(root).as_posix() for written_at, _, path in dated if written_at]


def _written_at(path: Path) -> int:
    """Return a file's time in ns; 0 if a training has just replaced it by a newer one."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def resume_choices() -> list[str]:
    """Return what ``resume_from`` may be."""
    return [NO_RESUME, RESUME_LATEST, *state_names()]


def find_state(resume_from: str, *, prefix: str) -> Path | None:
    """Return the file to go on from, None for a new training.

    Args:
        resume_from: ``"none"``, ``"latest"``, or a name of ``state_names``.
        prefix: Of the runs among which the latest is looked for.

    Raises:
        RequestError: If there is no such state.
    """
    if resume_from == NO_RESUME:
        return None
    names = state_names()
    if resume_from == RESUME_LATEST:
        run = re.compile(re.escape(_clean(prefix)) + r"_\d{5,}/[^/]*")
        names = [name for name in names if run.fullmatch(name)]
        chosen = names[0] if names else None
    else:
        chosen = resume_from if resume_from in names else None
    if chosen is None:
        raise RequestError(
            f"resume_from={resume_from!r} was asked with save_prefix={prefix!r}",
            limit=f"{states_folder()} holds {names[:5] or 'no such state'}",
            way_out="Choose one of the list, or 'none' for a new training",
        )
    return states_folder() / chosen


def resume_version(resume_from: str, prefix: str) -> str:
    """Return a text that changes when another state, or a changed one, would be gone on from.

    With ``latest`` it does not change by the last state of a training that went on from there and did all its
    steps: that prompt, asked again, has its result.
    """
    try:
        path = find_state(resume_from, prefix=prefix)
    except RequestError as error:
        return str(error)
    if path is None:
        return NO_RESUME
    version = f"{path}:{_written_at(path)}"
    return _BEGAN_FROM.get(version, version) if resume_from == RESUME_LATEST else version


def note_complete(begun: str, last: Path) -> None:
    """Note that a training from ``latest`` has done all its steps.

    Args:
        begun: The ``resume_version`` that it began with.
        last: Its last state.
    """
    _BEGAN_FROM[f"{last}:{_written_at(last)}"] = begun


class RunStates:
    """The states of one run.

    Args:
        prefix: The training's file prefix.
        keep: How many to keep; 0 writes none.
    """

    def __init__(self, prefix: str, *, keep: int) -> None:
        self.prefix = _clean(prefix)
        self.keep = keep
        self._folder: Path | None = None
        self._written: list[Path] = []

    @property
    def last(self) -> Path | None:
        """The newest that this run has written, None before."""
        return self._written[-1] if self._written else None

    def save(self, state: TrainingState) -> Path | None:
        """Write ``state``, unless it is there already, and return its path; None if none are wanted.

        Raises:
            SaveError: If it could not be written; older states are as before. Also if an older one cannot be
                removed.
        """
        if not (self.prefix and self.keep):
            return None
        if self._folder is None or not self._folder.is_dir():
            try:
                self._folder = _new_folder(states_folder() / self.prefix)
            except OSError as error:
                raise SaveError(
                    f"no folder for training states could be made in {states_folder()} ({error}). Free the "
                    "disk, or allow writing there."
                ) from error
        path = self._folder / f"step_{state.step:08}{_SUFFIX}"
        if path.exists():
            return path
        save_state(path, state)
        self._written.append(path)
        self._drop_old()
        return path

    def _drop_old(self) -> None:
        while len(self._written) > self.keep:
            old = self._written.pop(0)
            try:
                old.unlink(missing_ok=True)
            except OSError as error:
                raise SaveError(
                    f"the newest state is saved, but the older {old} cannot be removed ({error}). Remove it."
                ) from error


def _clean(prefix: str) -> str:
    """Return the prefix as it is found again by: without empty parts and those that mean "here"."""
    return "/".join(part for part in prefix.strip().replace("\\", "/").split("/") if part not in ("", "."))


def _new_folder(stem: Path) -> Path:
    """Make ``<stem>_00001``, or the next number that is free."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        try:
            folder = stem.with_name(f"{stem.name}_{number:05}")
            folder.mkdir()
            for parent in [folder.parent, *folder.parent.parents]:
                sync_folder(parent)
                if parent == states_folder().parent:
                    break
            return folder
        except FileExistsError:
            number += 1
