"""The pack in a ComfyUI: loaded from a folder of any name, and changing nothing by being imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NODE_IDS = {
    "FerryParallelModel",
    "FerryParallelSampler",
    "FerryParallelVAE",
    "FerryParallelTextEncoder",
    "FerryPlanParallelDegrees",
    "FerryDoctor",
    "FerryLoadDiffusionModelOffload",
    "FerryOffloadModel",
    "FerryTrainLoraOffload",
    "FerryLoadTrainingFolder",
    "FerryTrainingSetImages",
    "FerryCacheTrainingData",
    "FerryLoadConditioning",
    "FerrySaveConditioning",
}

pytestmark = [pytest.mark.comfy, pytest.mark.timeout(180)]

# A process of its own, as ComfyUI loads a pack: folder_paths, nodes, then load_custom_node. Forked for each
# folder, so that ComfyUI is imported once.
LOADER = """
import asyncio, json, os, sys
sys.path.insert(0, sys.argv[1])
import comfy.options
from comfy.cli_args import args
args.cpu = True
import utils.extra_config
import nodes, comfy.model_patcher, comfy.samplers, comfy.sample, comfy.model_base, comfy.ops
import comfy.model_management, comfy.lora, comfy.sd, comfy.sampler_helpers, comfy.patcher_extension

for pack in sys.argv[2:]:
    if os.fork() == 0:
        break
    if os.wait()[1] != 0:
        sys.exit(f"{pack} failed")
else:
    sys.exit()

def attributes():
    found = {}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] in {"comfy", "execution", "folder_paths", "server", "latent_preview"}:
            for key, value in vars(module).items():
                found[name, key] = id(value)
                if isinstance(value, type) and value.__module__ == name:
                    found |= {(name, key, inner): id(item) for inner, item in vars(value).items()}
    return found

before, path = attributes(), list(sys.path)
loaded = asyncio.run(nodes.load_custom_node(pack))
after = attributes()
ours = {key: value for key, value in nodes.NODE_CLASS_MAPPINGS.items() if key.startswith("Ferry")}
for node in ours.values():
    node.INPUT_TYPES()
    node.GET_SCHEMA().validate()
print(json.dumps({
    "loaded": loaded,
    "nodes": sorted(ours),
    "changed": sorted(map(str, (key for key in before if after.get(key) != before[key]))),
    "path": [entry for entry in sys.path if entry not in path],
    "web": {key: value for key, value in nodes.EXTENSION_WEB_DIRS.items()},
}), flush=True)
"""


def test_comfyui_loads_the_pack_under_any_folder_name(comfyui_path, tmp_path):
    packs = [tmp_path / name for name in ("my-pack 2", "comfyui_ferry")]
    for pack in packs:
        pack.symlink_to(ROOT, target_is_directory=True)
    run = subprocess.run(
        [sys.executable, "-c", LOADER, str(comfyui_path), *map(str, packs)],
        capture_output=True, text=True, timeout=120, cwd=tmp_path, env=os.environ | {"PYTHONPATH": ""},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    results = [json.loads(line) for line in run.stdout.splitlines() if line.startswith('{"loaded"')]
    assert len(results) == len(packs)
    for pack, result in zip(packs, results, strict=True):
        assert result["loaded"] is True, run.stderr
        assert set(result["nodes"]) == NODE_IDS
        assert result["changed"] == []
        assert result["path"] == []
        assert result["web"] == {pack.name: str(pack / "web")}


def test_node_classes_are_listed_once_and_described():
    from comfyui_ferry.nodes.extension import NODES

    schemas = [node.GET_SCHEMA() for node in NODES]
    assert {schema.node_id for schema in schemas} == NODE_IDS
    assert len(schemas) == len(NODE_IDS)
    for schema in schemas:
        schema.validate()
        assert schema.description
        assert (ROOT / "web" / "docs" / schema.node_id).is_dir() or (
            ROOT / "web" / "docs" / f"{schema.node_id}.md"
        ).is_file()
