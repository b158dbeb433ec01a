"""A stand-in for CLIP-L, made in a moment. ComfyUI has no smaller text encoder; most of this one is zeros.

Its layers add nothing, so each token stays its own embedding and that of its place. It tells captions apart
and knows no language: enough to train with captions on a CPU, without a download.
"""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path

import torch

NAME = "ferry_tiny_clip_l.safetensors"
"""Below ``models/text_encoders``. Loaded with the type *sd3*, its conditionings are 4096 wide, as Wan's."""

_WIDTH, _HIDDEN, _LAYERS = 768, 3072, 12
_WORDS, _PLACES = 49408, 77


def write_text_encoder(folder: Path) -> Path:
    """Write the file, unless it is there; zeros are holes in it, so 78 of its 246 MB take room on the disk.

    Args:
        folder: Of the file, usually ``models/text_encoders``.

    Returns:
        The file.
    """
    path = folder / NAME
    if path.is_file():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    shapes, end = _shapes(), 0
    header: dict[str, dict] = {}
    for name, shape in shapes.items():
        start, end = end, end + math.prod(shape) * torch.float16.itemsize
        header[name] = {"dtype": "F16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # so that the tensors are aligned
    head = struct.pack("<Q", len(text)) + text
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        file.write(head)
        for name, tensor in _values().items():
            file.seek(len(head) + header[name]["data_offsets"][0])
            file.write(memoryview(tensor.numpy()).cast("B"))
        file.truncate(len(head) + end)
    return partial.rename(path)


def _shapes() -> dict[str, list[int]]:
    shapes: dict[str, list[int]] = {
        "embeddings.token_embedding.weight": [_WORDS, _WIDTH],
        "embeddings.position_embedding.weight": [_PLACES, _WIDTH],
    }
    for layer in range(_LAYERS):
        linears = {f"self_attn.{kind}_proj": [_WIDTH, _WIDTH] for kind in ("q", "k", "v", "out")}
        linears |= {"mlp.fc1": [_HIDDEN, _WIDTH], "mlp.fc2": [_WIDTH, _HIDDEN]}
        norms = {f"layer_norm{number}": [_WIDTH] for number in (1, 2)}
        for name, shape in (linears | norms).items():
            shapes[f"encoder.layers.{layer}.{name}.weight"] = shape
            shapes[f"encoder.layers.{layer}.{name}.bias"] = shape[:1]
    shapes |= {"final_layer_norm.weight": [_WIDTH], "final_layer_norm.bias": [_WIDTH]}
    return {f"text_model.{name}": shape for name, shape in shapes.items()} | {
        "text_projection.weight": [_WIDTH, _WIDTH]
    }


def _values() -> dict[str, torch.Tensor]:
    """Return what is not zero, in the order of the file."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(_WORDS - 1 + _WIDTH, generator=generator).half()
    return {
        "text_model.embeddings.token_embedding.weight": noise.unfold(0, _WIDTH, 1).contiguous(),
        "text_model.embeddings.position_embedding.weight": torch.randn(
            _PLACES, _WIDTH, generator=generator
        ).half(),
        "text_model.final_layer_norm.weight": torch.ones(_WIDTH).half(),
        "text_projection.weight": torch.eye(_WIDTH).half(),
    }
