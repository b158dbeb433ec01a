"""The direction of imports, read from the source: nodes -> comfy_adapter -> engines -> base."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

BASE = {"cuda_capture", "errors", "log", "module_hooks", "module_paths"}
COMFYUI = {
    "comfy",
    "comfy_extras",
    "comfy_execution",
    "folder_paths",
    "nodes",
    "server",
    "execution",
    "latent_preview",
}
# What each core package may import from its siblings, besides the base modules.
ALLOWED = {
    "offload": set(),
    "parallel": set(),
    "workers": set(),
    "plans": {"parallel"},
    "training": {"offload", "parallel"},
    "comfy_adapter": {"offload", "parallel", "workers", "plans", "training"},
}


def absolute_imports(tree: ast.AST) -> set[str]:
    """Top-level names of every absolute import in the file."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add((node.module or "").split(".")[0])
    return names


def relative_targets(tree: ast.AST, file: Path, root: Path) -> set[tuple[str, ...]]:
    """Every relative import of the file, as a path of names from the pack's root."""
    package = file.relative_to(root).parts[:-1]
    targets = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level > 0:
            base = package[: len(package) - node.level + 1]
            module = tuple(node.module.split(".")) if node.module else ()
            if module:
                targets.add((*base, *module))
            else:
                targets |= {(*base, alias.name) for alias in node.names}
    return targets


def violations(root: Path) -> list[str]:
    """Every import under `root` that goes against the direction of layers."""
    found = []
    for file in sorted([*root.glob("*.py"), *root.glob("core/**/*.py"), *root.glob("nodes/**/*.py")]):
        tree = ast.parse(file.read_text())
        layer = file.relative_to(root).parts
        name = "/".join(layer)
        outside = absolute_imports(tree)
        if "comfyui_ferry" in outside:
            found.append(f"{name}: imports the pack by name; use a relative import")
        if layer[:2] != ("core", "comfy_adapter") and outside & COMFYUI:
            found.append(f"{name}: imports {sorted(outside & COMFYUI)}; only core/comfy_adapter may")
        if "comfy_api" in outside and layer[0] != "nodes":
            found.append(f"{name}: imports comfy_api; only nodes may")
        problems = (judge(layer, target) for target in sorted(relative_targets(tree, file, root)))
        found += [f"{name}: {problem}" for problem in problems if problem]
    return found


def judge(layer: tuple[str, ...], target: tuple[str, ...]) -> str | None:
    """Return what is wrong with importing `target` from the file `layer`, or None."""
    dotted = ".".join(target)
    if layer[0] == "nodes":
        return judge_node(target, dotted)
    if layer[0] != "core":
        return None if target[0] == "nodes" else f"the root may import nodes only, not {dotted}"
    if target[0] != "core":
        return f"core imports {dotted}, a layer above it"
    if len(target) < 2:
        return "core imports its own root"
    own = layer[1] if len(layer) > 2 else None
    other = target[1]
    if own is None or own.removesuffix(".py") in BASE:
        return None if other in BASE else f"base imports {dotted}, a layer above it"
    if other == own or other in BASE or other in ALLOWED[own]:
        return None
    return f"{own} imports {dotted}; it may import only {sorted(ALLOWED[own] | BASE)}"


def judge_node(target: tuple[str, ...], dotted: str) -> str | None:
    if target[0] == "nodes":
        return None
    if len(target) > 2:
        return f"nodes import {dotted}, a file inside a core package; import the package's public names"
    return None


def test_the_pack_keeps_the_direction_of_imports():
    assert violations(ROOT) == []


@pytest.mark.parametrize(
    ("file", "source", "message"),
    [
        ("core/offload/bad.py", "import comfy.ops", "only core/comfy_adapter may"),
        ("core/offload/bad.py", "from ..parallel import mesh", "offload imports core.parallel"),
        ("core/workers/bad.py", "from ..offload.units import Unit", "workers imports core.offload.units"),
        ("core/plans/bad.py", "from ..comfy_adapter import attention", "plans imports core.comfy_adapter"),
        ("core/errors.py", "from .offload import manager", "base imports core.offload"),
        ("core/training/bad.py", "from comfyui_ferry.core import offload", "use a relative import"),
        ("core/parallel/bad.py", "from ...nodes import parallel", "a layer above it"),
        ("nodes/bad.py", "import folder_paths", "only core/comfy_adapter may"),
        ("nodes/bad.py", "from ..core.offload.manager import X", "a file inside a core package"),
        ("core/comfy_adapter/bad.py", "import comfy_api.latest", "only nodes may"),
    ],
)
def test_a_planted_import_is_caught(tmp_path: Path, file: str, source: str, message: str):
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(source + "\n")
    assert any(message in problem for problem in violations(tmp_path))
