"""The parts of ``docs/models.md``, each written by the test file whose results it holds.

A part begins with a comment that names it. A row stands for what people know by a name; its cell holds the
numbers of ranks on which every case of the row passed, and is never written by hand.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from .tiny_models import is_newer_comfyui

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "models.md"
# Case -> number of ranks -> relative error.
Seen = Mapping[str, Mapping[int, float]]


@dataclass(frozen=True)
class PartRow:
    """One autoencoder or text encoder.

    Args:
        name: Its name.
        models: The models that use it.
        cases: The cases that run its class.
        newer_only: Whether the node takes it with 0.33 only.
    """

    name: str
    models: str
    cases: tuple[str, ...]
    newer_only: bool = False


def render_parts(title: str, intro: str, rows: Sequence[PartRow], seen: Seen) -> str:
    """Return a part with the lines of all rows that have results."""
    head = f"\n## {title}\n\n{intro}\n\n| class | models | ranks | ComfyUI |\n|---|---|:---:|:---:|\n"
    return head + "".join(f"{line}\n" for line in _lines(rows, seen))


def check_part(name: str, title: str, intro: str, rows: Sequence[PartRow], seen: Seen) -> None:
    """Check that the published part is what a run saw, or write it where ``FERRY_WRITE_DOCS`` says so.

    An older ComfyUI lacks some classes: its lines must be among the published ones.
    """
    if is_newer_comfyui():
        check_section(name, render_parts(title, intro, rows, seen))
    else:
        assert set(_lines(rows, seen)) <= set(read_section(name).splitlines())


def check_section(name: str, text: str) -> None:
    """Check that the published part is ``text``, or write it."""
    if os.environ.get("FERRY_WRITE_DOCS"):
        _write_section(name, text)
    assert read_section(name) == text


def read_section(name: str) -> str:
    """Return the published text of a part; empty if there is none."""
    return _sections().get(name, "")


def skip_without_results(missing: bool) -> None:
    """Skip a check of the page if only some cases of the file ran."""
    if missing:
        pytest.skip("needs the results of every case")


def _lines(rows: Sequence[PartRow], seen: Seen) -> list[str]:
    lines = []
    for row in rows:
        found = [seen[case] for case in row.cases if case in seen]
        if found:
            ranks = sorted(set.intersection(*(set(errors) for errors in found)))
            version = "0.33" if row.newer_only else "0.3.75"
            lines.append(f"| {row.name} | {row.models} | {', '.join(map(str, ranks))} | {version} |")
    return lines


def _sections() -> dict[str, str]:
    pieces = re.split(r"^<!-- part: (.+) -->\n", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return dict(zip(pieces[1::2], pieces[2::2], strict=True))


def _write_section(name: str, text: str) -> None:
    sections = _sections() | {name: text}
    PAGE.write_text("".join(f"<!-- part: {key} -->\n{value}" for key, value in sections.items()))
