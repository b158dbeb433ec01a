from __future__ import annotations

import json

import pytest
from comfyui_ferry.core.errors import RequestError
from comfyui_ferry.core.workers import WorkerPool, links, pool
from ferry_support.worker_specs import cpu_spec

GPUS = ("GPU-1111", "GPU-2222")


@pytest.fixture(autouse=True)
def private_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(links, "_known", {})
    return tmp_path


def script(monkeypatch, tmp_path, text):
    """Put a script in the place of the probe; it notes each run."""
    file = tmp_path / "probe.py"
    file.write_text(f"open({str(tmp_path / 'runs')!r}, 'a').write('x')\n{text}\n")
    monkeypatch.setattr(links, "_PROBE", file)
    return lambda: len((tmp_path / "runs").read_text())


def answer(**changes):
    return f"print({json.dumps({'gpus': [], 'links': [], 'nccl': None} | changes)!r})"


def test_the_real_probe_runs_without_gpus(monkeypatch):
    found = links.probe_links(())
    assert found == {"gpus": [], "links": [], "nccl": None, "failure": None}


def test_a_good_answer_is_kept_for_other_processes_and_asked_again_on_demand(monkeypatch, tmp_path):
    runs = script(monkeypatch, tmp_path, answer())
    links.check_links(GPUS)
    monkeypatch.setattr(links, "_known", {})
    links.check_links(GPUS)
    assert runs() == 1
    links.check_links(GPUS[:1])
    links.probe_links(GPUS, refresh=True)
    assert runs() == 3


def test_what_is_known_is_told_without_a_probe(monkeypatch, tmp_path):
    runs = script(monkeypatch, tmp_path, answer(links=[{"from": 0, "to": 1, "bytes_per_s": 2e10}]))
    assert links.known_links(GPUS) is None
    links.check_links(GPUS)
    monkeypatch.setattr(links, "_known", {})
    known = links.known_links(GPUS)
    assert known is not None and known["links"][0]["bytes_per_s"] == 2e10
    assert links.known_links(GPUS[::-1]) is None
    assert runs() == 1


def test_what_nccl_prints_when_it_is_asked_to_is_no_part_of_the_answer(monkeypatch, tmp_path):
    noise = "print('host:7:7 [0] NCCL INFO Bootstrap')"
    script(monkeypatch, tmp_path, f"{noise}\n{answer(nccl={'version': '2', 'right': True})}\n{noise}")
    assert links.probe_links(GPUS)["nccl"] == {"version": "2", "right": True}


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("import time; time.sleep(60)", "hung for 0.5 s"),
        ("raise OSError('no link')", "code 1: OSError: no link"),
        ("import os; os.abort()", "code -6"),
        ("print('NCCL version 2.29')", "without an answer"),
        (answer(nccl={"version": "2", "right": False}), "wrong sums"),
    ],
)
def test_bad_links_are_refused_before_a_worker_starts_and_tried_again(monkeypatch, tmp_path, text, match):
    runs = script(monkeypatch, tmp_path, text)
    monkeypatch.setattr(links, "_TIMEOUT_S", 0.5 if "sleep" in text else 60)
    monkeypatch.setattr(pool, "launch", lambda spec: pytest.fail("a worker was started"))
    for _ in range(2):
        with pytest.raises(RequestError, match=f"{match}.*NCCL_P2P_DISABLE"):
            WorkerPool.start(cpu_spec(2, devices=GPUS, backend="nccl"))
    assert runs() == (2 if "sleep" not in text else runs())


@pytest.mark.multigpu
def test_the_links_of_real_gpus():
    found = links.probe_links(None, refresh=True)
    assert found["failure"] is None
    assert len(found["links"]) >= 2
    assert found["nccl"]["right"]
