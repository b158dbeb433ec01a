"""What a person reads about the nodes is there, in English and in Chinese, where ComfyUI looks for it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LOCALES = ("en", "zh")
# vue-i18n, with which the front-end shows texts, gives these a meaning.
SPECIAL = re.compile(r"[@{}|]")
TABLE = re.compile(
    r"^(?:export )?const (?:AXES|KINDS|BUDGETS|BUDGET_NODES) = (.*?);$", re.MULTILINE | re.DOTALL
)
# A bullet or a table's row that explains inputs.
LISTED = re.compile(r"^(?:- ([`*]{1,2}[a-z_0-9`*, \u3001]+)[:\uff1a]|\| ([a-z_]+) \|)", re.MULTILINE)
CHINESE = re.compile(r"[\u4e00-\u9fff]")

pytestmark = [pytest.mark.comfy, pytest.mark.timeout(120)]


def load(name: str) -> dict:
    return json.loads((ROOT / "locales" / "zh" / f"{name}.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def schemas():
    from comfyui_ferry.nodes.extension import NODES

    return {node.define_schema().node_id: node.define_schema() for node in NODES}


def test_every_input_and_output_is_explained(schemas):
    missing = [
        f"{node}.{entry.id or entry.display_name}"
        for node, schema in schemas.items()
        for entry in [*schema.inputs, *schema.outputs]
        if not entry.tooltip
    ]
    assert missing == []
    # Where ComfyUI knows aliases, a search finds each node by words other than its name.
    known = [schema for schema in schemas.values() if hasattr(schema, "search_aliases")]
    assert [schema.node_id for schema in known if not schema.search_aliases] == []


def test_every_node_has_a_help_page_in_each_language(schemas):
    folders = {folder.name for folder in (ROOT / "web" / "docs").iterdir()}
    assert folders == set(schemas)
    for node in schemas:
        for locale in LOCALES:
            page = (ROOT / "web" / "docs" / node / f"{locale}.md").read_text(encoding="utf-8")
            assert page.startswith("# "), (node, locale)
            assert bool(CHINESE.search(page)) == (locale == "zh"), (node, locale)


def test_every_help_page_names_the_inputs_of_its_node_and_no_others(schemas):
    ksampler = {"seed", "steps", "cfg", "sampler_name", "scheduler", "denoise"}
    for node, schema in schemas.items():
        widgets = {entry.id for entry in schema.inputs if hasattr(entry, "default")}
        known = {entry.id or entry.display_name for entry in [*schema.inputs, *schema.outputs]}
        for locale in LOCALES:
            page = (ROOT / "web" / "docs" / node / f"{locale}.md").read_text(encoding="utf-8")
            named = set(re.findall(r"[a-z_0-9]+", page))
            assert widgets - named - (ksampler if "KSampler" in page else set()) == set(), (node, locale)
            listed = LISTED.findall(page)
            explained = {name for entry in listed for name in re.findall(r"[a-z_0-9]+", "".join(entry))}
            assert explained - known <= {"input", "output"}, (node, locale)


def test_the_chinese_texts_are_those_of_the_nodes(schemas):
    translated = load("nodeDefs")
    assert set(translated) == set(schemas)
    for node, schema in schemas.items():
        texts = translated[node]
        assert set(texts["inputs"]) == {entry.id for entry in schema.inputs}, node
        assert set(texts.get("outputs", {})) == {str(place) for place in range(len(schema.outputs))}, node
        entries = [*texts["inputs"].values(), *texts.get("outputs", {}).values()]
        for text in [texts["display_name"], texts["description"], *(entry["tooltip"] for entry in entries)]:
            assert CHINESE.search(text), (node, text)
            assert not SPECIAL.search(text), (node, text)


def panel_texts() -> set[str]:
    """The texts that the panels pass to `say`, and the remedies that the server sends to them."""
    from comfyui_ferry.core.comfy_adapter.worker_notices import loss_notice

    texts = {loss_notice(reason, 1).remedy for reason in ("out of memory", "SIGKILL", "other")}
    for file in (ROOT / "web" / "js").glob("*.js"):
        source = file.read_text(encoding="utf-8")
        texts |= set(re.findall(r'\bsay\(\s*"([^"]+)"', source))
        texts |= set(re.findall(r'\btext: "([^"]+)"', source))
        for table in TABLE.findall(source):
            texts |= {text for text in re.findall(r'"([^"]+)"', table) if re.match(r"[{A-Z]|tensor ", text)}
    return texts


def test_every_text_of_the_panels_is_translated_with_its_places():
    words = load("main")["ferry"]
    names = {text for text in panel_texts() if not re.fullmatch(r"[BCTRU]|Ferry\.\w+", text)}
    assert sorted(names - set(words)) == []
    sources = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "web" / "js").glob("*.js"))
    unused = [text for text in words if text not in names and f'"{text}"' not in sources]
    assert unused == []
    for text, translation in words.items():
        assert set(re.findall(r"\{\w+\}", text)) == set(re.findall(r"\{\w+\}", translation)), text


def test_comfyui_serves_them(schemas, tmp_path, monkeypatch):
    """As the front-end asks for them under ``/i18n``, with the pack in a folder of any name."""
    import folder_paths
    from app.custom_node_manager import CustomNodeManager

    (tmp_path / "some pack").symlink_to(ROOT, target_is_directory=True)
    monkeypatch.setattr(folder_paths, "get_folder_paths", lambda name: [str(tmp_path)])
    served = CustomNodeManager().build_translations()["zh"]
    assert served["nodeDefs"] == load("nodeDefs")
    assert served["settings"] == load("settings")
    assert served["ferry"] == load("main")["ferry"]
