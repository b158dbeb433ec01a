from __future__ import annotations

import os
import stat

import pytest
from comfyui_ferry.core.workers import WorkerPool, launcher
from ferry_support.worker_specs import SUPPORT, cpu_spec, grown, open_files


def test_a_worker_sees_what_its_spec_says(monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync")
    monkeypatch.setenv("RANK", "5")
    with WorkerPool.start(cpu_spec(1, import_paths=(str(SUPPORT),))) as pool:
        described = pool.call("describe")[0]
        directory = pool._group.directory
        assert stat.S_IMODE(os.stat(directory).st_mode) == 0o700
    assert described["allocator"] is None
    assert described["visible"] == ""
    assert described["threads"] == 1
    assert described["path"][0] == str(SUPPORT)
    assert described["rank"] == 0
    assert not directory.exists()


def test_extra_environment_reaches_every_worker(pool):
    described = pool.call("describe")
    assert [result["extra"] for result in described.values()] == ["given", "given"]
    assert [result["world_size"] for result in described.values()] == [2, 2]


def test_ranks_meet_over_loopback_unless_told_otherwise():
    environment = launcher._environment(cpu_spec(2), 1, "")
    assert environment["GLOO_SOCKET_IFNAME"] == environment["NCCL_SOCKET_IFNAME"] == "lo"
    assert environment["COMFYUI_FERRY_RANK"] == "1"
    other = launcher._environment(cpu_spec(2, environment={"GLOO_SOCKET_IFNAME": "eth0"}), 0, "")
    assert other["GLOO_SOCKET_IFNAME"] == "eth0"


def test_if_one_process_cannot_be_started_the_others_are_ended(monkeypatch):
    started, original = [], launcher.subprocess.Popen

    def popen(*args, **kwargs):
        if started:
            raise OSError("no more processes")
        started.append(original(*args, **kwargs))
        return started[-1]

    monkeypatch.setattr(launcher.subprocess, "Popen", popen)
    before = {"files": len(open_files())}
    with pytest.raises(OSError, match="no more processes"):
        launcher.launch(cpu_spec(2))
    assert started[0].returncode is not None
    assert grown(lambda: {"files": len(open_files())}, before) == {}
