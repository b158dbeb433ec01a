"""What `pip install` puts in place: every package of the tree, importable without ComfyUI."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NAME = "comfyui_ferry"


def packages_of_the_tree() -> set[str]:
    found = {NAME}
    for top in ("core", "nodes"):
        for init in (ROOT / top).rglob("__init__.py"):
            found.add(".".join((NAME, *init.parent.relative_to(ROOT).parts)))
    return found


def listed_packages() -> list[str]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]


def test_the_package_list_is_the_tree():
    listed = listed_packages()
    assert len(listed) == len(set(listed))
    assert set(listed) == packages_of_the_tree()


def test_every_folder_with_code_is_a_package():
    folders = {file.parent for top in ("core", "nodes") for file in (ROOT / top).rglob("*.py")}
    assert [str(folder) for folder in folders if not (folder / "__init__.py").is_file()] == []


def run_python(code: str, *, path: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, cwd=path,
        env=environment | {"PYTHONPATH": str(path)},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_importing_the_pack_imports_neither_torch_nor_comfyui(tmp_path):
    (tmp_path / NAME).symlink_to(ROOT, target_is_directory=True)
    code = (
        "import sys; before = set(sys.modules); import comfyui_ferry; "
        "print(sorted(set(sys.modules) - before), comfyui_ferry.__version__)"
    )
    loaded = run_python(code, path=tmp_path)
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert loaded.strip() == f"['comfyui_ferry'] {version}"


@pytest.mark.timeout(200)
def test_an_editable_install_serves_training_scripts(tmp_path):
    """`pip install -e .`, then the seed's import, from another folder and without ComfyUI."""
    pytest.importorskip("setuptools", minversion="77")
    target = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    checkout = tmp_path / "my-pack 2"
    checkout.symlink_to(ROOT, target_is_directory=True)
    run = subprocess.run(
        [*pip, "--target", str(target), "--editable", str(checkout)],
        capture_output=True, text=True, timeout=150,
    )  # fmt: skip
    if "No module named pip" in run.stderr:
        pytest.skip("this environment has no pip")
    assert run.returncode == 0, run.stderr
    code = (
        "import site, sys; site.addsitedir(sys.argv[1] if len(sys.argv) > 1 else " + repr(str(target)) + "); "
        "import comfyui_ferry; from comfyui_ferry.core.offload import OffloadTrainingManager; "
        "assert 'comfy' not in sys.modules; print(OffloadTrainingManager.__name__)"
    )
    assert run_python(code, path=target).strip() == "OffloadTrainingManager"
