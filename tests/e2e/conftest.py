"""A real ComfyUI server with the tiny checkpoint, shared by the tests of one file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ferry_support.comfy_server import PACK, ComfyServer
from ferry_support.tiny_checkpoint.make import ensure_checkpoint, link_checkpoint


@pytest.fixture(scope="module")  # not longer: its workers are processes that other tests would count
def server(tmp_path_factory: pytest.TempPathFactory, comfyui_path: Path) -> Iterator[ComfyServer]:
    """A started server whose base folder holds the tiny checkpoint and the LoRA's pictures."""
    base = tmp_path_factory.mktemp("comfyui")
    link_checkpoint(ensure_checkpoint(PACK / ".demo" / "checkpoints", comfyui_path), base)
    with ComfyServer(base, comfyui_path) as started:
        yield started


@pytest.fixture
def workflow() -> dict[str, Any]:
    """The shipped workflow, as the canvas saves it."""
    return json.loads((PACK / "workflows" / "train_and_sample.json").read_text(encoding="utf-8"))
