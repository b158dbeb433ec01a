from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from comfyui_ferry.core.workers.bootstrap import WATCH_THREAD
from comfyui_ferry.core.workers.spec import PACK_ROOT
from ferry_support.worker_specs import SUPPORT, exists, wait_until_gone

# What ComfyUI does, in small: the pack under a name that is a path, a pool started from a thread.
PARENT = """
    import importlib.util, os, sys, threading, time

    def load(alias, folder):
        spec = importlib.util.spec_from_file_location(
            alias, folder + "/__init__.py", submodule_search_locations=[folder])
        sys.modules[alias] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)

    root, support, phase, directory = sys.argv[1:]
    os.environ["TMPDIR"] = directory
    alias = root.replace(".", "_x_")
    load(alias, root)
    workers = importlib.import_module(alias + ".core.workers")
    devices = ("cpu",) * (2 if phase == "collective" else 1)
    spec = workers.WorkerSpec(
        devices, "ferry_support.worker_jobs", backend="gloo", num_threads=1,
        import_roots={"ferry_support": support})

    def say_started(pids):
        print(*pids, flush=True)

    def prompt():
        if phase == "starting":
            polls = []
            def poll():
                polls.append(1)
                if len(polls) == 4:
                    say_started(open(f"/proc/self/task/{os.getpid()}/children").read().split()
                                or children_of_threads())
            workers.WorkerPool.start(spec, poll=poll)
        pool = workers.WorkerPool.start(spec)
        if phase == "forked" and os.fork() == 0:
            time.sleep(30)
            os._exit(0)
        say_started(rank.process.pid for rank in pool._group.ranks)
        if phase == "collective":
            pool.call("stall_on", {"rank": 1})
        if phase == "exit":
            return pools.append(pool)
        time.sleep(60)

    def children_of_threads():
        return [pid for task in os.listdir("/proc/self/task")
                for pid in open(f"/proc/self/task/{task}/children").read().split()]

    pools = []
    thread = threading.Thread(target=prompt)
    thread.start()
    thread.join()
"""


def start_parent(phase: str, directory: Path) -> tuple[subprocess.Popen, list[int]]:
    command = [
        sys.executable,
        "-c",
        textwrap.dedent(PARENT),
        str(PACK_ROOT),
        str(SUPPORT),
        phase,
        str(directory),
    ]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == (2 if phase == "collective" else 1)
    return parent, pids


@pytest.mark.parametrize("phase", ["starting", "collective", "forked"])
def test_workers_end_with_a_killed_parent(phase, tmp_path):
    parent, pids = start_parent(phase, tmp_path)
    if phase == "collective":
        time.sleep(0.5)
    parent.kill()
    parent.wait()
    assert wait_until_gone(pids, 5) == []
    assert os.listdir(tmp_path) == []


def test_ctrl_c_is_for_the_parent_alone_and_exit_is_clean(tmp_path):
    parent, pids = start_parent("exit", tmp_path)
    for pid in pids:
        if exists(pid):
            os.kill(pid, signal.SIGINT)  # as a terminal would, were they in its foreground group
    assert parent.wait(20) == 0
    assert wait_until_gone(pids, 1) == []
    assert os.listdir(tmp_path) == []


def test_a_worker_survives_ctrl_c_and_is_out_of_the_terminals_group(pool):
    for rank in pool._group.ranks:
        rank.process.send_signal(signal.SIGINT)
    described = pool.call("describe")
    assert all(result["interrupt_ignored"] and result["session"] for result in described.values())


def test_the_thread_that_beats_is_known_by_its_name(pool):
    for rank in pool._group.ranks:
        names = [file.read_text().strip() for file in Path(f"/proc/{rank.process.pid}/task").glob("*/comm")]
        assert names.count(WATCH_THREAD) == 1


def test_the_packs_folders_are_not_on_the_workers_path(pool):
    for result in pool.call("describe").values():
        assert not [path for path in result["path"] if path in ("", ".") or str(PACK_ROOT) == path]
        assert not [path for path in result["path"] if path.startswith(str(PACK_ROOT / "core"))]
