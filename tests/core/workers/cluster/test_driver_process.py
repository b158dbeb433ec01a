from __future__ import annotations

import re
import time

import pytest
from comfyui_ferry.core.errors import WorkerError
from comfyui_ferry.core.workers.cluster import driver_process
from comfyui_ferry.core.workers.spec import PACK_ROOT
from ferry_support.worker_specs import exists


def test_only_the_driver_imports_ray():
    importers = [
        path.name
        for path in PACK_ROOT.glob("[cn]o*/**/*.py")
        if re.search(r"^\s*(import|from) ray\b", path.read_text(), re.M)
    ]
    assert importers == ["ray_driver.py"]


def test_a_driver_that_ends_says_so_and_leaves_nothing(monkeypatch, tmp_path):
    script = tmp_path / "driver.py"
    script.write_text("print('last words', flush=True); raise SystemExit(4)")
    monkeypatch.setattr(driver_process, "_SCRIPT", script)
    driver = driver_process.DriverProcess()
    with pytest.raises(WorkerError, match=r"exited with code 4.*\n*last words"):
        driver.wait_for("nodes", until=time.monotonic() + 20, poll=None)
    driver.close()
    assert not exists(driver.process.pid) and not driver.log_path.exists()


def test_a_driver_that_says_nothing_is_given_up(monkeypatch, tmp_path):
    script = tmp_path / "driver.py"
    script.write_text("import time; time.sleep(60)")
    monkeypatch.setattr(driver_process, "_SCRIPT", script)
    monkeypatch.setattr(driver_process, "_CLOSE_S", 0.1)
    driver = driver_process.DriverProcess()
    with pytest.raises(WorkerError, match=r"Ray did not answer in time \(nodes\)"):
        driver.wait_for("nodes", until=time.monotonic() + 0.1, poll=None)
    driver.close()
    assert not exists(driver.process.pid)
