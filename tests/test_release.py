"""What a release needs is there and agrees: version, changelog, registry entry, licences."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_version_and_changelog_agree():
    version = PROJECT["project"]["version"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", version)
    assert f'__version__ = "{version}"' in text("__init__.py")
    assert re.search(rf"^## {re.escape(version)}\b", text("CHANGELOG.md"), re.MULTILINE)


def test_the_registry_entry_is_complete():
    comfy, project = PROJECT["tool"]["comfy"], PROJECT["project"]
    assert comfy["PublisherId"] and comfy["DisplayName"]
    assert re.fullmatch(r"[a-z0-9][a-z0-9-]{1,98}", project["name"])  # the registry's rule for names
    assert project["description"] and project["urls"]["Repository"].startswith("https://")
    assert (ROOT / project["license-files"][0]).is_file() and (ROOT / project["readme"]).is_file()
    publish = text(".github/workflows/publish.yml")
    assert "REGISTRY_ACCESS_TOKEN" in publish and "tests/test_release.py" in publish


def test_the_steps_of_every_workflow_are_sound_shell_and_start_files_that_exist():
    pages = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
    assert {page.stem for page in pages} >= {"lint", "publish", "test"}
    for page in pages:
        jobs = yaml.safe_load(page.read_text(encoding="utf-8"))["jobs"]
        assert {need for job in jobs.values() for need in [job.get("needs", page.stem)]} <= {*jobs, page.stem}
        for step in (step for job in jobs.values() for step in job["steps"]):
            assert ("uses" in step) != ("run" in step), (page.name, step)
            script = re.sub(r"\$\{\{.*?\}\}", "value", step.get("run", ""))
            checked = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)
            assert checked.returncode == 0 and not checked.stderr, (page.name, script, checked.stderr)
            for started in re.findall(r"^bash (\S+)", script, re.MULTILINE):
                assert (ROOT / started).is_file(), (page.name, started)


def test_every_package_that_is_installed_has_its_licence_listed():
    page = text("docs/licences.md").lower()
    named = set(PROJECT["project"]["dependencies"])
    named |= {package for extra in PROJECT["project"]["optional-dependencies"].values() for package in extra}
    for name in ("tests/requirements.txt", "tests/requirements-no-deps.txt"):
        named |= {line for line in text(name).splitlines() if line and not line.startswith("#")}
    packages = {re.split(r"[<>=!~; ]", line)[0].lower() for line in named}
    assert {package for package in packages if not re.search(rf"\b{re.escape(package)}\b", page)} == set()


def test_links_between_the_pages_lead_somewhere():
    folders = ("", "benchmarks", "core/plans", "docs", "web/docs/*")
    pages = [page for folder in folders for page in ROOT.glob(f"{folder}/*.md".lstrip("/"))]
    assert len(pages) > 40
    for page in pages:
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8")):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name}: {target}"
