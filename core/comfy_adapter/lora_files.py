"""Where a LoRA file goes, and the proof that ComfyUI's own loader applies all of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import comfy.lora
import comfy.utils
import folder_paths
import torch
from torch import Tensor

from ..errors import RequestError, SaveError
from ..training import ALGORITHMS, save_verified

# What is still zero after a training has learned nothing; of each algorithm.
_ZERO_AT_START = (".lora_up.weight", ".lora_B.weight", ".lokr_w2", ".lokr_w2_a", ".hada_w2_a", ".diff")

# File systems take 255 bytes; number, ending and the temporary file's own need some.
_LONGEST_NAME_BYTES = 200


def check_prefix(prefix: str) -> None:
    """Refuse a prefix that leads out of ComfyUI's output folder; writes nothing.

    Raises:
        RequestError: If it does, or names no file.
    """
    parts = [part.encode() for part in prefix.replace("\\", "/").split("/")]
    if not prefix.isprintable() or max(map(len, parts)) > _LONGEST_NAME_BYTES:
        raise RequestError(
            f"save_prefix={prefix[:50]!r}, {len(prefix)} characters, was asked",
            limit="A file's name has no control characters, and the prefix at most "
            f"{_LONGEST_NAME_BYTES} bytes of it",
            way_out="Use a name such as loras/my_lora",
        )
    output = Path(folder_paths.get_output_directory()).resolve()
    target = (output / prefix).resolve()
    if (
        not prefix.strip()
        # States lie under the same prefix in a folder of their own, which it must not lead out of either.
        or b".." in parts
        or prefix.endswith(("/", "\\"))
        or target == output
        or not target.is_relative_to(output)
    ):
        raise RequestError(
            f"save_prefix={prefix!r} was asked",
            limit=f"Files are written inside ComfyUI's output folder ({output}) only",
            way_out="Use a name such as loras/my_lora, or leave it empty to save nothing",
        )


def save_lora(model: Any, lora: Mapping[str, Tensor], *, prefix: str, metadata: Mapping[str, str]) -> Path:
    """Write ``lora`` as ``<output>/<prefix>_00001_.safetensors`` (the next free number), verified.

    Args:
        model: The MODEL (``ModelPatcher``) it was trained on.
        lora: Tensors under the names that ``verify_lora`` accepts.
        prefix: Checked by ``check_prefix`` before.
        metadata: Strings for the file's header.

    Returns:
        The file's path.

    Raises:
        SaveError: If it could not be written or does not read back as meant; no file is left then.
    """
    try:
        folder, name, counter, _, _ = folder_paths.get_save_image_path(
            prefix, folder_paths.get_output_directory()
        )
    except OSError as error:
        raise SaveError(f"no folder for {prefix} could be made ({error}). Free the disk.") from error
    path = Path(folder) / f"{name}_{counter:05}_.safetensors"

    def verify(written: Path) -> None:
        loaded = comfy.utils.load_torch_file(str(written), safe_load=True)
        differing = sorted(lora.keys() ^ loaded.keys())
        differing += [key for key in lora.keys() & loaded.keys() if not torch.equal(lora[key], loaded[key])]
        if differing:
            raise SaveError(f"{written} reads back with other values for {differing[:5]}. Save it again.")
        verify_lora(model, loaded)

    save_verified(path, lora, metadata=metadata, verify=verify)
    return path


def verify_lora(model: Any, lora: Mapping[str, Tensor]) -> None:
    """Prove that ComfyUI's LoRA loader takes every key for this model, and that every layer changes.

    Raises:
        SaveError: Naming the keys that it would skip, or the adapters that are all zero.
    """
    key_map = comfy.lora.model_lora_keys_unet(model.model, {})
    patches = comfy.lora.load_lora(dict(lora), key_map, log_missing=False)
    names = {id(tensor): name for name, tensor in lora.items()}
    taken = {key for patch in patches.values() for key in getattr(patch, "loaded_keys", ())}
    taken |= {
        names[id(tensor)] for patch in patches.values() for tensor in _tensors(patch) if id(tensor) in names
    }
    # These are read by the loader itself, with the adapter of the same name.
    ends = [name for kind in ALGORITHMS.values() for name in kind.file_names.values()]
    ends += ["lora_B.weight"]
    layers = {key.removesuffix(f".{end}") for key in taken for end in ends if key.endswith(f".{end}")}
    taken |= {f"{layer}.{name}" for layer in layers for name in ("alpha", "dora_scale")}
    skipped = sorted(key for key in lora if key not in taken)
    unknown = sorted({_layer(key) for key in patches} - set(model.model.state_dict()))
    if skipped or unknown or not patches:
        raise SaveError(
            f"ComfyUI's loader would skip {len(skipped)} of {len(lora)} keys ({skipped[:5]}) and does not "
            f"know {unknown[:5]}. The LoRA would be silently incomplete; take these layers out of 'targets'."
        )
    bad = [key for key in lora if not bool(torch.isfinite(lora[key]).all())]
    if bad:
        raise SaveError(
            f"{len(bad)} tensors of the LoRA hold NaN or infinite values ({bad[:5]}). "
            "Lower the learning rate, or save in bf16 or fp32."
        )
    zero = _still_zero(patches, lora)
    if zero:
        raise SaveError(
            f"{len(zero)} adapters are still all zero after training ({zero[:5]}). They learned nothing; "
            "raise the learning rate or the steps, or take these layers out of 'targets'."
        )


def _layer(key: Any) -> str:
    """Return the layer that a patch changes; a part of a packed one is named with its place in it."""
    return key if isinstance(key, str) else key[0]


def _tensors(patch: Any) -> Sequence[Any]:
    """Return what a patch is made of: an adapter's tensors, or what is added to a norm or a bias."""
    return patch[1] if isinstance(patch, tuple) else patch.weights


def _still_zero(patches: Mapping[Any, Any], lora: Mapping[str, Tensor]) -> list[str]:
    """Return what is zero in layers of which nothing has learned.

    A part may rightly learn nothing: where the last block's text goes nowhere, so do its queries.
    """
    zero: dict[str, list[str]] = {}
    learned = set()
    names = {id(tensor): name for name, tensor in lora.items()}
    for key, patch in patches.items():
        for tensor in _tensors(patch):
            name = names.get(id(tensor), "")
            if name.endswith(_ZERO_AT_START):
                if bool(lora[name].any()):
                    learned.add(_layer(key))
                else:
                    zero.setdefault(_layer(key), []).append(name)
    return sorted(name for layer, names in zero.items() if layer not in learned for name in names)
