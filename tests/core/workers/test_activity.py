"""What a process does, told from the outside, in real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
from comfyui_ferry.core.workers.activity import Activity, ProcessActivity

LOOK_S = 0.25
# Each begins with a session of its own, as a worker does.
PROGRAMS = {
    "sleeps": "time.sleep(60)",
    "polls": "while True: time.sleep(0.02)",
    "computes": "while True: pass",
    "computes in a thread": "threading.Thread(target=spin).start(); time.sleep(60)",
    "computes in a child": "subprocess.Popen([sys.executable, '-c', 'while True: pass']).wait()",
}


def looks(program: str, number: int = 8) -> list[Activity]:
    code = "import subprocess, sys, threading, time\ndef spin():\n    while True: pass\nprint(flush=True)\n"
    command = [sys.executable, "-c", code + PROGRAMS[program]]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        if program.endswith("child"):
            time.sleep(0.5)
        activity, seen, last = ProcessActivity(process.pid), [], time.monotonic()
        for _ in range(number):
            time.sleep(LOOK_S)
            now = time.monotonic()
            seen.append(activity.look(now - last))
            last = now
        return seen
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.parametrize("program", ["sleeps", "polls"])
def test_a_process_that_does_nothing_is_quiet(program):
    assert looks(program)[2:].count(Activity.QUIET) >= 4  # one that polls may be caught running


@pytest.mark.parametrize("program", ["computes", "computes in a thread", "computes in a child"])
def test_a_process_that_computes_is_not(program):
    # A child is looked for after a while only, and a busy machine may take long to start it.
    assert looks(program, 12)[-3:].count(Activity.QUIET) == 0


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
