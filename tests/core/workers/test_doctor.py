from __future__ import annotations

import subprocess
from types import SimpleNamespace

import pytest
from comfyui_ferry.core.workers import doctor

GPU = {"name": "H", "uuid": "a", "total_bytes": 80 << 30}


def links(**changes):
    link = {"from": 0, "to": 1, "peer": True, "right": True, "bytes_per_s": 2e10}
    found = {
        "gpus": [GPU, GPU],
        "links": [link],
        "nccl": {"version": "2.27.5", "right": True},
        "failure": None,
    }
    return {**found, "links": [{**link, **changes.pop("link", {})}], **changes}


def report(monkeypatch, found):
    monkeypatch.setattr(doctor, "probe_links", lambda devices, refresh: found)
    return doctor.describe(doctor.examine())


def test_a_machine_without_gpus_gets_a_report(monkeypatch):
    text = report(monkeypatch, {"gpus": [], "links": [], "nccl": None, "failure": None})
    assert "PyTorch sees none" in text
    assert "host memory" in text
    assert "/dev/shm" in text


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "[ok     ] link 0 -> 1: 20.0 GB/s, peer to peer"),
        ({"link": {"peer": False}}, "[note   ] link 0 -> 1: 20.0 GB/s, through the host"),
        ({"link": {"right": False}}, "[PROBLEM] link 0 -> 1: 20.0 GB/s, peer to peer, WRONG DATA"),
        ({"failure": "it hung for 90 s"}, "[PROBLEM] GPU probe: it hung for 90 s"),
    ],
)
def test_links_are_judged(monkeypatch, changes, expected):
    assert expected in report(monkeypatch, links(**changes))


def test_wrong_sums_are_not_called_right(monkeypatch):
    wrong = {"version": "2.27.5", "right": False}
    text = report(monkeypatch, links(nccl=wrong, failure="NCCL gave wrong sums"))
    assert "[PROBLEM] GPU probe: NCCL gave wrong sums" in text
    assert "sums over all GPUs are right" not in text


@pytest.mark.parametrize(
    ("answer", "state", "seen"),
    [
        ({"stdout": "580.1\n580.1\n"}, "ok", "580.1"),
        ({"returncode": 9, "stdout": "NVIDIA-SMI has failed\nmore\n"}, "problem", "NVIDIA-SMI has failed"),
        ({}, "problem", "nvidia-smi lists no GPU"),
        (None, "problem", "nvidia-smi does not answer"),
    ],
)
def test_the_driver(monkeypatch, answer, state, seen):
    def run(command, **options):
        if answer is None:
            raise subprocess.TimeoutExpired(command, options["timeout"])
        return SimpleNamespace(**{"returncode": 0, "stdout": "", "stderr": "", **answer})

    monkeypatch.setattr(doctor.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(doctor.subprocess, "run", run)
    (found,) = doctor._driver()
    assert (found.state, found.seen) == (state, seen)


def test_whatever_is_no_good_has_a_remedy_of_one_line(monkeypatch):
    """Of every check, with values that each of them dislikes."""
    monkeypatch.setattr(doctor, "available_host_bytes", lambda: 1 << 30)
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda kind: (100, 100))
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: SimpleNamespace(total=1 << 20))
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    for name in ("NCCL_P2P_DISABLE", "CUDA_LAUNCH_BLOCKING", "RANK", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(name, "1")
    other = dict(GPU, name="another")
    bad = links(gpus=[GPU, other], link={"right": False})
    worse = [bad, links(link={"peer": False}), links(failure="x"), links(gpus=[], links=[], nccl=None)]
    findings = []
    for found in worse:
        monkeypatch.setattr(doctor, "probe_links", lambda devices, refresh, found=found: found)
        findings += doctor.examine()
    disliked = [finding for finding in findings if finding.state != "ok"]
    assert len({finding.subject for finding in disliked}) == 10
    assert all(finding.remedy and "\n" not in finding.remedy for finding in disliked)


def test_inherited_variables_come_with_a_remedy():
    found = {f.subject: f.remedy for f in doctor._variables({"NCCL_FOO": "1", "RANK": "3", "HOME": "x"})}
    assert found.keys() == {"variable NCCL_FOO", "variable RANK"}
    assert all(found.values())
