"""Write the tables of the documentation from the results in ``benchmarks/results``.

    python benchmarks/tables.py                                    # after a change of any result
    python benchmarks/tables.py add wan_parallel --gpu "two NVIDIA H200" --software "torch 2.11.0+cu130" \
        --command "python benchmarks/parallel.py wan ..." --section "Parallel sampling" printed.txt

A result is a JSON file: where it was measured (``command``, ``gpu``, ``software``, ``revision``, ``date``),
its ``columns`` (key -> heading and unit), and its ``rows``, whose values are numbers, ``[lowest, highest]``
or text. ``add`` makes one of a table that a benchmark printed, and a place for it at the end of a section of
docs/benchmarks.md. A page says ``<!-- results: NAME NAME -->`` where a table is to stand, up to
``<!-- end -->``; several results make one table. ``<!-- headlines -->`` takes the rows that results name as
``headlines``: what it is, a value of the row, and the columns to show with what they are called.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGES = (ROOT / "docs" / "benchmarks.md", ROOT / "README.md")
SOURCE = ("command", "gpu", "software", "revision", "date")
_PLACE = re.compile(r"(<!-- (results: [\w ]+|headlines) -->\n).*?(<!-- end -->)", re.DOTALL)
# Of a number, by its column's unit; "x" is a ratio, which is shown without it.
_FORMATS = {"s": ".3f", "ms": ".3g", "GiB": ".3g", "x": ".2f"}
Result = dict[str, Any]


def read_results() -> dict[str, Result]:
    """Return every result by its name, oldest first.

    Raises:
        ValueError: If one lacks where it comes from, or a row has a value that no column names.
    """
    results = {}
    for path in sorted(RESULTS.glob("*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        missing = [key for key in SOURCE if not result.get(key)]
        unknown = {key for row in result["rows"] for key in row} - set(result["columns"])
        if missing or unknown or not result["rows"]:
            raise ValueError(f"{path.name}: lacks {missing}; values without a column: {sorted(unknown)}")
        results[path.stem] = result
    return dict(sorted(results.items(), key=lambda item: item[1]["date"]))


def show(value: Any, unit: str) -> str:
    """Return one cell's text."""
    if value is None or isinstance(value, str):
        return value or ""
    numbers = value if isinstance(value, list) else [value]
    text = " to ".join(format(number, _FORMATS.get(unit, "g")) for number in numbers)
    return text if unit == "x" else f"{text} {unit}".strip()


def render_table(results: list[Result]) -> str:
    """Return one table of all results' rows, and a line that says how each was measured."""
    columns: dict[str, list[str]] = {}
    for result in results:
        columns |= {key: column for key, column in result["columns"].items() if key not in columns}
    several = len({result["revision"] for result in results}) > 1
    headings = [heading for heading, _ in columns.values()] + ["revision"] * several
    lines = [f"| {' | '.join(headings)} |", "|---" * len(headings) + "|"]
    for result in results:
        for row in result["rows"]:
            cells = [show(row.get(key), unit) for key, (_, unit) in columns.items()]
            lines.append(f"| {' | '.join(cells + [result['revision']] * several)} |")
    lines += ["", *(f"- `{r['command']}`: {', '.join(r[key] for key in SOURCE[1:])}." for r in results)]
    return "\n".join(lines) + "\n"


def render_headlines(results: dict[str, Result]) -> str:
    """Return the table of the rows that results name."""
    lines = ["| what | measured | GPU | revision, date |", "|---|---|---|---|"]
    for result in results.values():
        for headline in result.get("headlines", []):
            row = next(row for row in result["rows"] if headline["row"] in row.values())
            cells = [
                f"{name} {show(row[key], result['columns'][key][1])}"
                for key, name in headline["cells"].items()
            ]
            source = f"{result['gpu']} | {result['revision']}, {result['date']}"
            lines.append(f"| {headline['text']} | {', '.join(cells)} | {source} |")
    return "\n".join(lines) + "\n"


def render_page(text: str, results: dict[str, Result]) -> str:
    """Return a page with its tables written anew.

    Raises:
        KeyError: If it names a result that there is not.
    """

    def table(place: re.Match[str]) -> str:
        names = place[2].removeprefix("results: ").split()
        is_headlines = place[2] == "headlines"
        content = render_headlines(results) if is_headlines else render_table([results[n] for n in names])
        return place[1] + content + place[3]

    return _PLACE.sub(table, text)


def read_printed(text: str) -> tuple[dict[str, list[str]], list[dict[str, str]]]:
    """Return columns and rows of the first markdown table in what a benchmark printed.

    Raises:
        ValueError: If there is none.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip().startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    if len(cells) < 3 or set("".join(cells[1])) != {"-"}:
        raise ValueError("no table: a benchmark prints one whose lines start with '|'")
    keys = [f"{place} {heading}".strip() for place, heading in enumerate(cells[0])]
    columns = {key: [heading, ""] for key, heading in zip(keys, cells[0], strict=True)}
    rows = [
        dict(zip(keys, row, strict=True))
        for row in cells[2:]
        if row != cells[0] and set("".join(row)) != {"-"}
    ]
    return columns, rows


def add(options: argparse.Namespace) -> None:
    """Keep a printed table as a result, with its place in the page."""
    columns, rows = read_printed(options.printed.read_text(encoding="utf-8"))
    source = {key: getattr(options, key) for key in SOURCE}
    result = source | {"columns": columns, "rows": rows}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{options.name}.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    page = PAGES[0].read_text(encoding="utf-8")
    if re.search(rf"<!-- results: [\w ]*\b{options.name}\b", page):
        return
    head, heading, rest = page.partition(f"\n## {options.section}\n")
    if not heading:
        raise ValueError(f"{PAGES[0].name} has no section {options.section!r}")
    body, following, tail = rest.partition("\n## ")
    place = f"\n<!-- results: {options.name} -->\n<!-- end -->\n"
    PAGES[0].write_text(
        head + heading + body.rstrip("\n") + "\n" + place + following + tail, encoding="utf-8"
    )


def main() -> None:
    """Write the pages, after adding a result if that is asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    adding = parser.add_subparsers(dest="what").add_parser("add")
    revision = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    adding.add_argument("name", help="of the result: letters, digits and _")
    adding.add_argument("printed", type=Path, help="file with what the benchmark printed")
    for key in SOURCE[:3]:
        adding.add_argument(f"--{key}", required=True)
    adding.add_argument("--revision", default=revision.stdout.strip())
    adding.add_argument("--date", default=str(datetime.date.today()))
    adding.add_argument("--section", required=True, help="heading in docs/benchmarks.md")
    options = parser.parse_args()
    if options.what == "add":
        add(options)
    results = read_results()
    for page in PAGES:
        page.write_text(render_page(page.read_text(encoding="utf-8"), results), encoding="utf-8")


if __name__ == "__main__":
    main()
