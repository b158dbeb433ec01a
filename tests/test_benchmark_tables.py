"""The documentation's benchmark tables are those of the stored results."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PRINTED = """# a remark
| row | step | |
|---|---|---|
| ours | 1.2 s | |
# 3 s in all
| rival | failed | out of time |
"""


@pytest.fixture
def tables():
    spec = importlib.util.spec_from_file_location("ferry_tables", ROOT / "benchmarks" / "tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_pages_show_the_stored_results(tables):
    results = tables.read_results()
    pages = "".join(page.read_text(encoding="utf-8") for page in tables.PAGES)
    for page in tables.PAGES:
        text = page.read_text(encoding="utf-8")
        assert tables.render_page(text, results) == text, f"{page.name}: run `python benchmarks/tables.py`"
    named = {name for place in tables._PLACE.findall(pages) for name in place[1].split()[1:]}
    assert named == set(results)


def test_a_printed_table_becomes_a_result_with_a_place(tables, tmp_path, monkeypatch):
    page = tmp_path / "benchmarks.md"
    page.write_text("# Benchmarks\n\n## One\n\ntext\n\n## Two\n\nmore\n", encoding="utf-8")
    (tmp_path / "printed.txt").write_text(PRINTED, encoding="utf-8")
    monkeypatch.setattr(tables, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(tables, "PAGES", (page,))
    command = [
        "tables.py",
        "add",
        "some_run",
        str(tmp_path / "printed.txt"),
        "--gpu=H200",
        "--command=python x.py",
    ]
    command += ["--software=torch 2", "--revision=abc", "--date=2026-01-02", "--section=One"]
    monkeypatch.setattr("sys.argv", command)
    for _ in range(2):  # a second run of the same name takes the first one's place
        tables.main()
        text = page.read_text(encoding="utf-8")
        assert text.count("| rival | failed | out of time |") == 1
        assert text.index("- `python x.py`: H200, torch 2, abc, 2026-01-02.") < text.index("## Two")
    # A result that does not say where it comes from is none.
    file = tmp_path / "results" / "some_run.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"revision": ""}))
    with pytest.raises(ValueError, match=r"some_run.json: lacks \['revision'\]"):
        tables.read_results()


def test_numbers_are_shown_with_the_unit_of_their_column(tables):
    cells = [
        (1.0501, "s"),
        ([0.43, 0.46], "s"),
        (15.0, "ms"),
        (41.72, "GiB"),
        (2.35, "x"),
        (None, "s"),
        ("-", "s"),
    ]
    assert [tables.show(*cell) for cell in cells] == [
        "1.050 s", "0.430 to 0.460 s", "15 ms", "41.7 GiB", "2.35", "", "-"
    ]  # fmt: skip
