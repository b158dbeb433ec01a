"""What a process does, told from the outside, in real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from comfyui_ferry.core.workers.activity import Activity, ProcessActivity
from comfyui_ferry.core.workers.bootstrap import WATCH_THREAD

LOOK_S = 0.25
# Each begins with a session of its own, as a worker does.
PROGRAMS = {
    "sleeps": "time.sleep(60)",
    "polls": "while True: time.sleep(0.02)",
    "beats": "threading.Thread(target=beat).start(); time.sleep(60)",
    "computes": "while True: pass",
    "computes in a thread": "threading.Thread(target=spin).start(); time.sleep(60)",
    "computes in a child": "subprocess.Popen([sys.executable, '-c', 'while True: pass']).wait()",
}


def looks(programs: list[str], number: int) -> dict[str, list[Activity]]:
    """What each of the programs did, look by look; they run at the same time."""
    code = "import subprocess, sys, threading, time\ndef spin():\n    while True: pass\n"
    code += "def beat():\n    own = f'/proc/self/task/{threading.get_native_id()}/comm'\n"
    code += f"    open(own, 'w').write('{WATCH_THREAD}')\n    spin()\nprint(flush=True)\n"
    processes: dict[str, subprocess.Popen] = {}
    try:
        for program in programs:
            command = [sys.executable, "-c", code + PROGRAMS[program]]
            processes[program] = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
        for process in processes.values():
            assert process.stdout is not None
            process.stdout.readline()
        if any(program.endswith("child") for program in programs):
            time.sleep(0.5)
        activities = {program: ProcessActivity(process.pid) for program, process in processes.items()}
        seen: dict[str, list[Activity]] = {program: [] for program in programs}
        last = time.monotonic()
        for _ in range(number):
            time.sleep(LOOK_S)
            now = time.monotonic()
            for program, activity in activities.items():
                seen[program].append(activity.look(now - last))
            last = now
        return seen
    finally:
        for process in processes.values():
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def test_a_process_that_does_nothing_is_quiet():
    """Nor does one in which only the thread runs that tells its parent so."""
    for seen in looks(["sleeps", "polls", "beats"], 8).values():
        assert seen[2:].count(Activity.QUIET) >= 4  # one that polls may be caught running


def test_a_process_that_computes_is_not():
    # A child is looked for after a while only, and a busy machine may take long to start it.
    for program, seen in looks(["computes", "computes in a thread", "computes in a child"], 12).items():
        assert seen[-3:].count(Activity.QUIET) == 0, program


def test_of_a_process_that_need_do_nothing_little_is_read(monkeypatch):
    """Not its threads, nor all processes of the machine: workers may be idle for hours."""
    process = subprocess.Popen(["sleep", "60"], start_new_session=True)
    looked_through, listdir = [], os.listdir
    monkeypatch.setattr(os, "listdir", lambda folder: looked_through.append(folder) or listdir(folder))
    activity = ProcessActivity(process.pid)
    try:
        until = time.monotonic() + 5
        while activity.look(0.05, wanted=False) is not Activity.QUIET and time.monotonic() < until:
            time.sleep(0.05)
        assert [activity.look(0.05, wanted=False) for _ in range(8)] == [Activity.QUIET] * 8
        assert looked_through == []
        activity.look(0.05)
        assert len(looked_through) == 1
    finally:
        process.kill()
        process.wait()


def test_a_stopped_and_an_ended_process():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    activity = ProcessActivity(process.pid)
    process.send_signal(signal.SIGSTOP)
    until = time.monotonic() + 5
    while activity.look(LOOK_S) is not Activity.STOPPED and time.monotonic() < until:
        time.sleep(0.01)
    assert activity.look(LOOK_S) is Activity.STOPPED
    process.kill()
    while activity.look(LOOK_S) is not Activity.GONE and time.monotonic() < until:
        time.sleep(0.01)
    assert activity.look(LOOK_S) is Activity.GONE  # a zombie still
    process.wait()
    assert activity.look(LOOK_S) is Activity.GONE
