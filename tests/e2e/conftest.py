"""A real ComfyUI server with the tiny checkpoint, shared by the tests of one file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ferry_support.comfy_server import PACK, ComfyServer
from ferry_support.tiny_checkpoint.make import ensure_checkpoint, link_checkpoint

# Text encoders that CLIPLoader knows have 100 million weights or more; this node makes one of a few thousand.
_TINY_CLIP_NODE = f"""
import importlib.util

path = {str(PACK / "tests" / "support" / "tiny_clip_vae.py")!r}
spec = importlib.util.spec_from_file_location("ferry_tiny_clip", path)
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)


class TinyClip:
    INPUT_TYPES = classmethod(lambda cls: {{"required": {{}}}})
    RETURN_TYPES = ("CLIP",)
    FUNCTION = "load"

    def load(self):
        return (module.tiny_clip(width=4096),)


NODE_CLASS_MAPPINGS = {{"FerryTestTinyClip": TinyClip}}
"""


@pytest.fixture(scope="module")  # not longer: its workers are processes that other tests would count
def server(tmp_path_factory: pytest.TempPathFactory, comfyui_path: Path) -> Iterator[ComfyServer]:
    """A started server whose base folder holds the tiny checkpoint and the LoRA's pictures."""
    base = tmp_path_factory.mktemp("comfyui")
    link_checkpoint(ensure_checkpoint(PACK / ".demo" / "checkpoints", comfyui_path), base)
    (base / "custom_nodes").mkdir(exist_ok=True)
    (base / "custom_nodes" / "tiny_clip_node.py").write_text(_TINY_CLIP_NODE)
    with ComfyServer(base, comfyui_path) as started:
        yield started


@pytest.fixture
def workflow() -> dict[str, Any]:
    """The shipped workflow, as the canvas saves it."""
    return json.loads((PACK / "workflows" / "train_and_sample.json").read_text(encoding="utf-8"))
