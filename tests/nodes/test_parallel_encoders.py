"""Parallel VAE and Parallel Text Encoder as nodes; what they compute is tested with the adapter."""

from __future__ import annotations

from typing import Any

import pytest
from ferry_support.tiny_clip_vae import tiny_clip, tiny_vae

pytestmark = pytest.mark.comfy


def nodes_and_inputs() -> list[tuple[Any, str, Any]]:
    from comfyui_ferry.nodes.parallel_encoders import ParallelTextEncoder, ParallelVae

    return [(ParallelVae, "vae", tiny_vae()), (ParallelTextEncoder, "clip", tiny_clip(width=8))]


def test_schemas_are_valid_and_numbers_are_checked() -> None:
    from comfyui_ferry.core.errors import RequestError

    for node, name, value in nodes_and_inputs():
        schema = node.define_schema()
        schema.validate()
        assert [entry.id for entry in schema.inputs] == [name, "gpus"]
        assert all(entry.tooltip for entry in schema.inputs)
        assert node.validate_inputs(gpus=2) is True and node.validate_inputs() is True
        assert "There are" in node.validate_inputs(gpus=0)
        assert "Set gpus to a number from 1" in node.validate_inputs(gpus=100000)
        with pytest.raises(RequestError, match="whole number"):
            node.execute(value, gpus="2")
        with pytest.raises(RequestError, match="was asked"):  # neither class has a plan
            node.execute(value, gpus=2)


def test_another_choice_of_gpus_makes_them_anew(monkeypatch) -> None:
    from comfyui_ferry.nodes import parallel, parallel_encoders

    for module in (parallel, parallel_encoders):
        monkeypatch.setattr(module, "settings_version", lambda kind: f"chosen {kind}")
    for node in (
        parallel.ParallelModel,
        parallel_encoders.ParallelVae,
        parallel_encoders.ParallelTextEncoder,
    ):
        assert node.fingerprint_inputs(gpus=2) == "chosen gpus"
