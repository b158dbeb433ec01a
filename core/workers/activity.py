"""Whether a process does anything, read from ``/proc`` without its help.

A heartbeat from a thread proves that the interpreter lets threads run and nothing about the thread
that computes, and it falls silent in legitimate native calls that keep the interpreter's lock. What the
kernel counts needs no help of the process and does not lie: a process that computes, compiles, waits
for its GPU (CUDA spins), reads a disk or waits for a core shows it; one that sleeps, is stopped or waits
for a lock or for another process does not.

What this module does not do: it does not judge. Waiting for another rank looks like hanging; only
``watchdog`` knows who waits for whom. Source: proc(5).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import Enum
from io import FileIO
from pathlib import Path

from .bootstrap import WATCH_THREAD

# Of one core. A loop that polls with short sleeps stays below the first; the second is for all other
# threads and the processes that this one started (compilers), some of which tick for ever.
_MAIN_SHARE = 0.08
_OTHERS_SHARE = 0.25
# Threads of the communication libraries work while this rank waits for others, and the one that beats asks
# for the interpreter's lock again and again while native code keeps it.
_IGNORED_THREADS = ("nccl", "pt_nccl", "pt_gloo", "pt_tcpstore", WATCH_THREAD)
# Looking through all processes of the machine costs more, so only a longer silence is worth it.
_LOOKS_BEFORE_PROCESSES = 3
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Activity(Enum):
    """What a process did since the last look."""

    BUSY = "busy"  # it used a core
    WAITING = "waiting"  # it wants a core or a disk and has not got it
    QUIET = "quiet"  # it wants nothing
    STOPPED = "stopped"  # by SIGSTOP or its like
    GONE = "gone"


@dataclass(frozen=True)
class _Thread:
    name: str
    state: str
    ticks: int
    session: int


class ProcessActivity:
    """Watches one process that leads its own session.

    Args:
        pid: The process.
        root: Where the proc file system is mounted.
    """

    def __init__(self, pid: int, root: Path = Path("/proc")) -> None:
        self._pid = pid
        self._root = root
        self._main = _open(self._task(pid))
        self._main_ticks: int | None = None
        self._other_ticks: dict[str, int] = {}
        self._quiet_looks = 0
        self.used_s = 0.0  # processor time of the main thread between the last two looks

    def look(self, elapsed_s: float, *, wanted: bool = True) -> Activity:
        """Return what it did in the ``elapsed_s`` seconds since the last look.

        Only a process whose main thread is quiet costs more than one small file.

        Args:
            elapsed_s: Since the last look.
            wanted: Whether it should be doing anything. If not, only its main thread is looked at, since
                workers stay, idle, for hours.
        """
        main = None if self._main is None else _read(self._main)
        if main is None or main.state in "ZX":
            return Activity.GONE
        if main.state == "T":
            return Activity.STOPPED
        used = 0 if self._main_ticks is None else main.ticks - self._main_ticks
        self._main_ticks = main.ticks
        self.used_s = used / _TICKS_PER_S
        self._quiet_looks += 1
        if used >= _MAIN_SHARE * elapsed_s * _TICKS_PER_S:
            self._quiet_looks = 0
            return Activity.BUSY
        if main.state != "S":  # runnable, on a disk, or held by a debugger
            self._quiet_looks = 0
            return Activity.WAITING
        if not wanted:
            self._quiet_looks = 0
            return Activity.QUIET
        return self._look_at_others(elapsed_s)

    def close(self) -> None:
        """Look no more."""
        if self._main is not None:
            self._main.close()
        self._main = None

    def _look_at_others(self, elapsed_s: float) -> Activity:
        used, wants = 0, False
        seen: dict[str, int] = {}
        for path, thread in self._others():
            used += thread.ticks - self._other_ticks.get(path, thread.ticks)
            wants = wants or thread.state in "RD"
            seen[path] = thread.ticks
        self._other_ticks = seen
        if used >= _OTHERS_SHARE * elapsed_s * _TICKS_PER_S:
            return Activity.BUSY
        return Activity.WAITING if wants else Activity.QUIET

    def _others(self) -> list[tuple[str, _Thread]]:
        """Return the threads besides the main one, and the other processes of the session."""
        found = []
        for name in _names(self._root / str(self._pid) / "task"):
            thread = None if name == str(self._pid) else _read_once(self._task(name))
            if thread is not None and not thread.name.lower().startswith(_IGNORED_THREADS):
                found.append((f"task/{name}", thread))
        if self._quiet_looks <= _LOOKS_BEFORE_PROCESSES:
            return found
        for name in _names(self._root):
            if name.isdigit() and name != str(self._pid):
                process = _read_once(self._root / name / "stat")
                if process is not None and process.session == self._pid:
                    found.append((name, process))
        return found

    def _task(self, thread: int | str) -> Path:
        return self._root / str(self._pid) / "task" / str(thread) / "stat"


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []


def _open(path: Path) -> FileIO | None:
    try:
        return FileIO(path)
    except (FileNotFoundError, ProcessLookupError):
        return None


def _read_once(path: Path) -> _Thread | None:
    file = _open(path)
    if file is None:
        return None
    with file:
        return _read(file)


def _read(file: FileIO) -> _Thread | None:
    """Return what the ``stat`` file of a thread or a process says now; None if it is gone."""
    try:
        text = os.pread(file.fileno(), 4096, 0).decode("ascii", errors="replace")
    except ProcessLookupError:
        return None
    # The name stands in parentheses and may hold any character.
    start, end = text.index("("), text.rindex(")")
    fields = text[end + 2 :].split()
    # The time of children that ended and were waited for counts too.
    return _Thread(text[start + 1 : end], fields[0], sum(map(int, fields[11:15])), int(fields[3]))
