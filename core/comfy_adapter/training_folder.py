"""Training sets from ComfyUI's input folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import folder_paths

from ..errors import RequestError
from ..training.dataset import (
    FolderOptions,
    TrainingSet,
    folder_version,
    join_sets,
    load_training_folder,
    order_folders,
    plain_examples,
)
from ..training.families import FAMILIES, OTHER, bucket_step_px

NO_CONTROL = "none"
FAMILY_NAMES = ("any", *(family.name for family in FAMILIES))
"""Choices for a model family where no model is at hand; "any" fits all."""


def input_subfolders() -> list[str]:
    """Return the folders below ComfyUI's input folder, those that look like training data first.

    A new node takes the first; ComfyUI itself makes folders there, such as ``3d``.
    """
    return order_folders(Path(folder_paths.get_input_directory()), folder_paths.get_input_subfolders())


def training_folder_version(folder: str, control_folder: str = NO_CONTROL) -> str:
    """Return a text that changes whenever a file of the folders does."""
    root = Path(folder_paths.get_input_directory())
    folders = [folder] if control_folder == NO_CONTROL else [folder, control_folder]
    return " ".join(folder_version(root, name) for name in folders)


def load_input_folder(
    folder: str,
    *,
    family: str,
    before: TrainingSet | None,
    control_folder: str = NO_CONTROL,
    **options: Any,
) -> TrainingSet:
    """Return the training set in a folder below ComfyUI's input folder.

    Args:
        folder: Relative to the input folder.
        family: One of ``FAMILY_NAMES``; decides the step of the bucket sides.
        before: A set that this one is joined to.
        control_folder: With the pictures that an edit model is given; ``NO_CONTROL`` for none.
        options: Those of ``FolderOptions``, but for the step.

    Raises:
        RequestError: If the folder is not inside, or naming every file that cannot be used.
    """
    if family not in FAMILY_NAMES:
        raise RequestError(
            f"model_family={family!r} was asked",
            limit=f"Known are {list(FAMILY_NAMES)}",
            way_out="Set model_family to one of them",
        )
    step_px = OTHER.bucket_step_px if family == "any" else bucket_step_px(family)
    root = Path(folder_paths.get_input_directory())
    controls = "" if control_folder == NO_CONTROL else control_folder
    settings = FolderOptions(step_px=step_px, control_folder=controls, **options)
    return join_sets(before, load_training_folder(root, folder, settings))


def training_set_images(training_set: TrainingSet, *, seed: int) -> tuple[list[Any], list[str]]:
    """Return an epoch as IMAGE batches ``(F, H, W, 3)`` and captions, for nodes that know no set."""
    pairs = list(plain_examples(training_set, seed=seed))
    return [pixels for pixels, _ in pairs], [caption for _, caption in pairs]
