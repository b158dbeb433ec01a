"""Which files a diffusion model is in: inside ComfyUI's model folders, whole, and with sound headers."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import folder_paths
import torch

from ..errors import RequestError
from ..offload import MappedFile, WeightFile
from .gguf_files import GGUF_SUFFIX, open_gguf

_INDEX_SUFFIX = ".safetensors.index.json"
_PLAIN_SUFFIXES = (".safetensors", ".sft")
_OFFERED_SUFFIXES = (*_PLAIN_SUFFIXES, GGUF_SUFFIX)
_CHECKPOINT_PREFIX = "checkpoints/"
_MAX_INDEX_BYTES = 50_000_000


def diffusion_model_names() -> list[str]:
    """Return what a loader can offer: files, the indices of sharded models, and whole checkpoints."""
    names = [name for name in folder_paths.get_filename_list("diffusion_models") if _is_known(name)]
    for folder in folder_paths.get_folder_paths("diffusion_models"):
        # Kinds of file that ComfyUI's own list leaves out.
        for pattern in (f"**/*{_INDEX_SUFFIX}", f"**/*{GGUF_SUFFIX}"):
            names += [path.relative_to(folder).as_posix() for path in sorted(Path(folder).glob(pattern))]
    checkpoints = [name for name in folder_paths.get_filename_list("checkpoints") if _is_known(name)]
    names += [_CHECKPOINT_PREFIX + name for name in checkpoints]
    return list(dict.fromkeys(names))


def find_diffusion_model(name: str) -> Path:
    """Return the file of that name.

    Raises:
        RequestError: If there is none, or the name leads out of ComfyUI's folders.
    """
    places = [("diffusion_models", name)]
    if name.startswith(_CHECKPOINT_PREFIX):
        places.append(("checkpoints", name.removeprefix(_CHECKPOINT_PREFIX)))
    for kind, relative in places:
        for folder in folder_paths.get_folder_paths(kind):
            path = os.path.normpath(Path(folder) / relative)
            # Unlike Path.is_file, this one takes a name that no file can have for one that is not there.
            if Path(path).is_relative_to(os.path.normpath(folder)) and os.path.isfile(path):
                return Path(path)
    raise RequestError(
        f"the diffusion model {name!r} was asked",
        limit="ComfyUI's folders diffusion_models and checkpoints hold no file of that name",
        way_out="Choose one from the list",
    )


def open_diffusion_model(path: Path) -> tuple[Sequence[MappedFile], dict[str, torch.Tensor], dict[str, str]]:
    """Return the files of a model, its tensors by name (over the files' bytes), and its metadata.

    Raises:
        RequestError: If a file is missing, not whole, or of another kind.
    """
    if path.name.endswith(_INDEX_SUFFIX):
        files, owners = _open_shards(path)
    elif path.suffix.lower() == GGUF_SUFFIX:
        file, tensors = open_gguf(path)
        return [file], tensors, {}
    elif path.suffix.lower() in _PLAIN_SUFFIXES:
        files, owners = [WeightFile(path)], None
    else:
        raise _refusal(path, "Only safetensors and GGUF files are read", "Convert it, or use a stock loader")
    tensors = {}
    for file in files:
        for name, tensor in file.tensors().items():
            if owners is None or owners.get(name) == file.path.name:
                tensors[name] = tensor
    missing = sorted(set(owners or ()) - set(tensors))
    if missing or not tensors:
        raise _refusal(path, f"These tensors are in none of its files: {missing[:5]}")
    metadata: dict[str, str] = {}
    for file in files:
        metadata |= file.metadata
    return files, tensors, metadata


def _is_known(name: str) -> bool:
    return name.lower().endswith(_OFFERED_SUFFIXES)


def _open_shards(index: Path) -> tuple[list[WeightFile], dict[str, str]]:
    if index.stat().st_size > _MAX_INDEX_BYTES:
        raise _refusal(index, f"An index has at most {_MAX_INDEX_BYTES} bytes")
    try:
        text = index.read_text(encoding="utf-8")
        owners = json.loads(text, object_pairs_hook=_without_repetition)["weight_map"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _refusal(index, f"It is no index of a sharded model ({error})") from error
    if not isinstance(owners, dict) or not all(isinstance(shard, str) for shard in owners.values()):
        raise _refusal(index, "Its weight_map is no table of file names")
    shards = sorted(set(owners.values()))
    for shard in shards:
        if Path(shard).name != shard or not shard.endswith(_PLAIN_SUFFIXES):
            raise _refusal(index, f"It names {shard!r}, which is no safetensors file beside it")
    return [WeightFile(index.parent / shard) for shard in shards], owners


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name appears twice")
    return result


def _refusal(path: Path, limit: str, way_out: str = "Download or save it again") -> RequestError:
    return RequestError(f"loading {path.name} was asked", limit=limit, way_out=way_out)
