"""Graphs and prompts that people have saved keep working: nothing is taken from a node."""

from __future__ import annotations

import copy
import json

import pytest
from ferry_support.comfy_server import comfyui_version
from ferry_support.node_definitions import PREFIX, read_definitions, stored_versions, trim
from ferry_support.node_diff import breaking_changes

KIND = "FerryParallelModel"


@pytest.mark.comfy
def test_nothing_that_a_saved_workflow_uses_has_changed(comfyui_path):
    version = comfyui_version(comfyui_path)
    if version not in stored_versions():
        pytest.skip(f"no stored definitions for ComfyUI {version}")
    from comfyui_ferry.nodes.extension import NODES

    present = json.loads(
        json.dumps({node.GET_SCHEMA().node_id: trim(node.GET_NODE_INFO_V1()) for node in NODES})
    )
    stored = {kind: node for kind, node in read_definitions(version).items() if kind.startswith(PREFIX)}
    assert breaking_changes(stored, present) == []


def changed(edit) -> list[str]:
    stored = {KIND: read_definitions("0.33.0")[KIND]}
    after = copy.deepcopy(stored)
    edit(after)
    return breaking_changes(stored, after)


def _move_first_widget(after):
    required = after[KIND]["input"]["required"]
    required["gpus"] = required.pop("gpus")
    after[KIND]["input_order"]["required"] = list(required)


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda after: after.pop(KIND), "the node is gone"),
        (lambda after: after[KIND]["input"]["required"].pop("gpus"), "input 'gpus' is gone"),
        (lambda after: after[KIND]["input"]["required"].update(gpus=["FLOAT", {}]), "was INT and is FLOAT"),
        (lambda after: after[KIND]["input"]["required"].update(new=["INT", {}]), "'new' is required"),
        (_move_first_widget, "the widgets were"),
        (lambda after: after[KIND].update(output=["LATENT"]), "the outputs were"),
    ],
)
def test_a_change_that_breaks_them_is_named(edit, said):
    assert any(said in problem for problem in changed(edit))


def test_what_is_added_at_the_end_breaks_nothing():
    def edit(after):
        after["FerryNew"] = after[KIND]
        after[KIND]["input"]["optional"]["new"] = ["INT", {"default": 1}]
        after[KIND]["input_order"]["optional"].append("new")
        after[KIND]["output"].append("STRING")

    assert changed(edit) == []
