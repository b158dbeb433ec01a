from __future__ import annotations

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


def test_inherited_variables_come_with_a_remedy():
    found = {f.subject: f.remedy for f in doctor._variables({"NCCL_FOO": "1", "RANK": "3", "HOME": "x"})}
    assert found.keys() == {"variable NCCL_FOO", "variable RANK"}
    assert all(found.values())
