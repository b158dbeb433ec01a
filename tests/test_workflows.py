"""The shipped workflows fit the nodes of both ComfyUI versions, and are what the script writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ferry_support.graph_check import missing_nodes, problems
from ferry_support.make_model_workflows import NEWER, OLDER, PAGE, build_all, definitions, dump, render_page
from ferry_support.make_workflow import CACHING_WORKFLOW, WORKFLOW, build_caching_workflow, build_workflow
from ferry_support.node_definitions import read_definitions
from ferry_support.readme_matrix import README, read_matrix, render, workflows_of
from ferry_support.workflow_models import MODELS
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted((ROOT / "workflows").glob("*.json"))
FROZEN = sorted((ROOT / "tests" / "data" / "saved_workflows").glob("*/*.json"))


def read(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def test_there_is_a_workflow_for_every_model_and_mode_and_a_picture_of_each():
    names = {path.stem for path in FILES}
    for model in MODELS:
        modes = {"low_vram", "parallel"} | ({"train"} if model.trainable else set())
        assert {f"{model.key}_{mode}" for mode in modes} <= names
    for path in FILES:
        picture = path.with_suffix(".jpg")
        assert picture.stat().st_size < 60_000, picture
        with Image.open(picture) as image:
            assert image.format == "JPEG" and min(image.size) >= 200


@pytest.mark.parametrize("version", [OLDER, NEWER])
def test_every_node_input_link_and_value_exists(version):
    known = read_definitions(version)
    newer_only = {model.key for model in MODELS if model.newer_only}
    for path in (*FILES, *FROZEN):
        graph = read(path)
        is_newer = any(path.stem.startswith(f"{key}_") for key in newer_only)
        if version == OLDER and is_newer:
            continue
        assert missing_nodes(graph, known) == set(), path.name
        assert problems(graph, known) == [], path.name


def test_the_files_and_the_page_are_what_the_script_writes():
    for name, graph in build_all(definitions()).items():
        assert (ROOT / "workflows" / name).read_text(encoding="utf-8") == dump(graph), (
            f"{name}: run `python -m support.make_model_workflows` in tests"
        )
    for path, build in ((WORKFLOW, build_workflow), (CACHING_WORKFLOW, build_caching_workflow)):
        assert read(path) == build(definitions()), (
            f"{path.name}: run `python -m support.make_workflow` in tests"
        )
    assert PAGE.read_text(encoding="utf-8") == render_page()


def test_the_readme_has_every_model_with_its_workflows_and_what_the_parity_tests_saw():
    rows = [workflows_of(row) for row in read_matrix()]
    assert sorted(model.key for models in rows for model in models) == sorted(model.key for model in MODELS)
    assert README.read_text(encoding="utf-8") == render(), "run `python -m support.readme_matrix` in tests"


def test_a_loader_offers_the_download_of_each_file_that_its_note_names():
    for path in FILES:
        graph = read(path)
        offered = {
            model["name"]: model["url"]
            for node in graph["nodes"]
            for model in node["properties"].get("models", [])
        }
        notes = "".join(
            node["widgets_values"][0] for node in graph["nodes"] if node["type"] == "MarkdownNote"
        )
        for name, url in offered.items():
            assert f"[{name}]({url})" in notes, f"{path.name}: {name}"
            values = [value for node in graph["nodes"] for value in node["widgets_values"]]
            assert name in values, f"{path.name} loads no {name}"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda graph: graph["nodes"][0].update(type="VAELoader"), "its outputs are"),
        (lambda graph: graph["nodes"][-2]["inputs"].clear(), "nothing is connected"),
        (lambda graph: graph["nodes"][0]["widgets_values"].append(3), "values for the widgets"),
        (lambda graph: graph["links"][0].__setitem__(5, "LATENT"), "link 1"),
    ],
)
def test_the_check_notices(change, said):
    graph = read(ROOT / "workflows" / "qwen_image_parallel.json")
    links = graph["links"]
    if said == "nothing is connected":
        graph["links"] = [link for link in links if link[3] != graph["nodes"][-2]["id"]]
    change(graph)
    assert any(said in problem for problem in problems(graph, read_definitions(NEWER)))
