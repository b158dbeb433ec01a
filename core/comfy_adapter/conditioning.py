"""CONDITIONING as files: encode a prompt once, drop the text encoder, load the result ever after.

One file holds one prompt: a safetensors file with the tensor ``cond`` ``(1, T, C)`` (T tokens, C
wide), any further tensors of the conditioning under their own names (``pooled_output``,
``attention_mask``), and in the metadata the format, its version and plain values as JSON. Nothing
is pickled. The files live in ``models/conditioning``.

What this module does not do: it never encodes text, and what it cannot write (a ControlNet, hooks,
areas, reference latents) it refuses instead of leaving out.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import folder_paths
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ..errors import RequestError

FOLDER = "conditioning"
_FORMAT = "comfyui_ferry.conditioning"
_VERSION = "1"
_SUFFIX = ".safetensors"


def register_conditioning_folder() -> None:
    """Tell ComfyUI about ``models/conditioning``; called when the node list is built, not at import."""
    folder_paths.add_model_folder_path(FOLDER, os.path.join(folder_paths.models_dir, FOLDER))


def conditioning_files() -> list[str]:
    """Return the conditioning files on this machine, relative to their folder."""
    return [name for name in folder_paths.get_filename_list(FOLDER) if name.lower().endswith(_SUFFIX)]


def conditioning_version(name: str) -> str:
    """Return a text that changes whenever the file does, so that ComfyUI reads it again."""
    status = _existing(name).stat()
    return f"{status.st_mtime_ns}:{status.st_size}"


def load_conditioning(name: str) -> list[list[Any]]:
    """Return the CONDITIONING saved as ``name``: one ``[cond (1, T, C), values]`` pair on the CPU.

    Raises:
        RequestError: If there is no such file, or it is not a conditioning file of a known version.
    """
    path = _existing(name)
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {key: file.get_tensor(key) for key in file.keys()}
    except SafetensorError as error:
        raise RequestError(
            f"conditioning file {name!r} cannot be read ({error})",
            limit="Only complete safetensors files can be loaded",
            way_out="Save it again with Save Conditioning",
        ) from error
    _check_format(name, metadata)
    cond = tensors.pop("cond", None)
    if cond is None:
        raise RequestError(
            f"conditioning file {name!r} has no tensor 'cond', only {sorted(tensors)}",
            limit="The text embedding has to be there under the name 'cond'",
            way_out="Save it again with Save Conditioning",
        )
    _check_cond(f"conditioning file {name!r}", cond)
    return [[cond, {**json.loads(metadata.get("values", "{}")), **tensors}]]


def save_conditioning(conditioning: list[Any], name: str, *, overwrite: bool = False) -> Path:
    """Write one CONDITIONING as ``name`` into ``models/conditioning``, whole or not at all.

    Args:
        conditioning: ComfyUI's CONDITIONING with exactly one entry.
        name: File name, with or without ``.safetensors``; may name a subfolder.
        overwrite: Replace a file of that name instead of refusing.

    Returns:
        The path of the file.

    Raises:
        RequestError: If the name leaves the folder or is taken, or the conditioning holds something
            that a file cannot.
    """
    path = _target(name)
    if path.exists() and not overwrite:
        raise RequestError(
            f"conditioning file {name!r} exists",
            limit="A file is only replaced when asked to",
            way_out="Choose another name or switch overwrite on",
        )
    tensors, metadata = _to_file(conditioning)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, partial = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".partial")
    os.close(handle)
    try:
        save_file(tensors, partial, metadata)
        os.replace(partial, path)
    except BaseException:
        os.unlink(partial)
        raise
    return path


def _to_file(conditioning: list[Any]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    if len(conditioning) != 1:
        raise RequestError(
            f"the conditioning has {len(conditioning)} entries",
            limit="One file holds one prompt",
            way_out="Save each prompt on its own and combine them after loading",
        )
    cond, values = conditioning[0]
    _check_cond("the conditioning", cond)
    tensors, plain = {"cond": cond}, {}
    for key, value in values.items():
        if isinstance(value, torch.Tensor) and key != "cond":
            tensors[key] = value
        elif value is None or isinstance(value, bool | int | float | str):
            plain[key] = value
        else:
            raise RequestError(
                f"the conditioning holds {key!r}, a {type(value).__name__}",
                limit="A conditioning file holds tensors and plain values",
                way_out=f"Save the prompt before the node that adds {key!r}, and add that node after loading",
            )
    kept = {key: tensor.detach().to("cpu").contiguous().clone() for key, tensor in tensors.items()}
    return kept, {"format": _FORMAT, "version": _VERSION, "values": json.dumps(plain)}


def _check_cond(where: str, cond: Any) -> None:
    if (
        not isinstance(cond, torch.Tensor)
        or cond.ndim != 3
        or not cond.is_floating_point()
        or 0 in cond.shape
    ):
        found = (
            f"{tuple(cond.shape)} of {cond.dtype}" if isinstance(cond, torch.Tensor) else type(cond).__name__
        )
        raise RequestError(
            f"{where} has a text embedding of shape {found}",
            limit="It has to be floating-point numbers of shape (batch, tokens, width), none of them 0",
            way_out="Connect the output of a text encoder",
        )
    if not torch.isfinite(cond).all():
        raise RequestError(
            f"{where} has NaN or infinite values in its text embedding",
            limit="Every value has to be finite",
            way_out="Encode the prompt again, in a wider dtype",
        )


def _check_format(name: str, metadata: dict[str, str]) -> None:
    found = metadata.get("format"), metadata.get("version")
    if found != (_FORMAT, _VERSION):
        raise RequestError(
            f"{name!r} says format {found[0]!r}, version {found[1]!r}",
            limit=f"This version of the pack reads format {_FORMAT!r}, version {_VERSION!r}",
            way_out="Save the prompt with this version's Save Conditioning",
        )


def _existing(name: str) -> Path:
    for folder in folder_paths.get_folder_paths(FOLDER):
        path = _inside(Path(folder), name)
        if path.is_file():
            return path
    raise RequestError(
        f"there is no conditioning file {name!r}",
        limit=f"{folder_paths.get_folder_paths(FOLDER)} holds {conditioning_files()}",
        way_out="Save one with Save Conditioning, or refresh the page's file list",
    )


def _target(name: str) -> Path:
    if not name.strip() or name.endswith(("/", "\\")):
        raise RequestError(
            f"the conditioning's file name is {name!r}",
            limit="A file name is needed",
            way_out="Type a name, for example 'cat'",
        )
    file_name = name if name.lower().endswith(_SUFFIX) else name + _SUFFIX
    return _inside(Path(folder_paths.get_folder_paths(FOLDER)[0]), file_name)


def _inside(folder: Path, name: str) -> Path:
    # Not resolve(): people link model files from elsewhere, and a link in the folder is theirs to make.
    path = Path(os.path.abspath(folder / name))
    if not path.is_relative_to(os.path.abspath(folder)):
        raise RequestError(
            f"the conditioning's file name is {name!r}",
            limit="The file has to stay inside models/conditioning",
            way_out="Use a plain name, without '..' and not starting at the root",
        )
    return path
