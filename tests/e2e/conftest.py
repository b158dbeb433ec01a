"""A real ComfyUI server with the tiny checkpoint, shared by the tests of one file."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ferry_support.browser import find_browser
from ferry_support.comfy_server import PACK, ComfyServer
from ferry_support.tiny_checkpoint.make import ensure_checkpoint, link_checkpoint
from ferry_support.tiny_text_encoder import write_text_encoder
from ferry_support.tiny_workflow_files import write_files, write_pictures


@pytest.fixture(scope="module")  # not longer: its workers are processes that other tests would count
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, comfyui_path: Path
) -> Iterator[ComfyServer]:
    """A started server with the tiny checkpoint and the LoRA's pictures.

    In a file that sets `EVERY_WORKFLOW`, also with tiny files for every workflow, which take seconds to make.
    """
    base = tmp_path_factory.mktemp("comfyui")
    link_checkpoint(ensure_checkpoint(PACK / ".demo" / "checkpoints", comfyui_path), base)
    write_text_encoder(base / "models" / "text_encoders")
    (base / "custom_nodes").mkdir(exist_ok=True)
    loader = PACK / "tests" / "support" / "tiny_loader_node.py"
    (base / "custom_nodes" / loader.name).symlink_to(loader)
    if getattr(request.module, "EVERY_WORKFLOW", False):
        write_files(base / "models")
        write_pictures(base, comfyui_path)
    with ComfyServer(base, comfyui_path) as started:
        yield started


@pytest.fixture
def workflow() -> dict[str, Any]:
    """The shipped workflow, as the canvas saves it."""
    return json.loads((PACK / "workflows" / "train_and_sample.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def chromium() -> None:
    """Skip without Chromium; CI has to have it."""
    if find_browser() is None:
        if os.environ.get("CI") == "true":
            pytest.fail("no Chromium in CI: the browser tests have to run there")
        pytest.skip("no Chromium (apt-get install chromium)")
