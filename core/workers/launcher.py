"""Start one process per rank, and end them; nothing else.

``subprocess.Popen`` and not multiprocessing: inside ComfyUI, spawn and forkserver run ComfyUI's
``main.py`` again and fail, and fork copies a process that holds CUDA and threads.
"""

from __future__ import annotations

import mmap
import os
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from ..log import RANK_VARIABLE
from . import bootstrap
from .channel import Link, connect
from .progress import read_progress, read_waiting
from .shared_memory import BufferLender, SharedFile
from .spec import PACK_ALIAS, PACK_ROOT, WorkerSpec, visible_device

# Settings of the parent that are wrong in a worker: ComfyUI's allocator choice, and the rank
# variables of a launcher that started the parent.
_CLEARED = (
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    # One address for every communicator of the machine: those of two servers would meet.
    "NCCL_COMM_ID",
)
_REAP_S = 3.0
_DUMP_POLL_S = 0.05


@dataclass
class RankProcess:
    """One worker process, seen from its parent.

    Attributes:
        rank: Its rank.
        device: The device it was asked to use.
        process: The process.
        link: Messages to and from it.
        log_path: What it prints, and its stacks.
        heartbeat: Shared counter that grows while the process runs Python, and that of its job's progress.
        lifeline: Write end of a pipe; that it closes, also by our own death, wakes a stopped worker up.
    """

    rank: int
    device: str | int
    process: subprocess.Popen
    link: Link
    log_path: Path
    heartbeat: mmap.mmap
    lifeline: int

    def beats(self) -> int:
        """Return the heartbeat counter."""
        return struct.unpack_from("<Q", self.heartbeat, 0)[0]

    def progress(self) -> int:
        """Return how many parts of its jobs it has done; grows for as long as one gets on."""
        return read_progress(self.heartbeat)

    def waits(self) -> bool:
        """Return whether it only waits, for its device or for other ranks."""
        return read_waiting(self.heartbeat)

    def close(self) -> None:
        """Close our ends of what connects us. May be called again."""
        self.link.close()
        self.heartbeat.close()
        if self.lifeline >= 0:
            os.close(self.lifeline)
        self.lifeline = -1

    def wait(self, timeout_s: float) -> int | None:
        """Return the exit code (negative: the signal), or None if it still runs after ``timeout_s``."""
        try:
            return self.process.wait(max(0.0, timeout_s))
        except subprocess.TimeoutExpired:
            return None


@dataclass
class RankGroup:
    """The processes of one pool and what they share.

    Attributes:
        directory: Private directory (mode 0700) of logs and the rendezvous file.
        lender: Buffers for messages to the ranks.
        ranks: The processes, by rank.
    """

    directory: Path
    lender: BufferLender
    ranks: list[RankProcess] = field(default_factory=list)

    def wait(self, timeout_s: float) -> bool:
        """Return whether all processes ended within ``timeout_s``."""
        until = time.monotonic() + timeout_s
        return all([rank.wait(until - time.monotonic()) is not None for rank in self.ranks])

    def kill(self) -> None:
        """End all processes now and collect them, so that no zombie is left."""
        for rank in self.ranks:
            if rank.process.poll() is None:
                rank.process.kill()
        self.wait(_REAP_S)

    def dump_stacks(self, *, without: Collection[int], timeout_s: float) -> list[int]:
        """Have every running rank but ``without`` write its stacks to its log; return those ranks.

        Args:
            without: Ranks to leave alone.
            timeout_s: How long to wait for the stacks.
        """
        others = [rank for rank in self.ranks if rank.rank not in without]
        running = [rank for rank in others if rank.process.poll() is None]
        first = latest = [rank.log_path.stat().st_size for rank in running]
        for rank in running:
            rank.process.send_signal(signal.SIGUSR1)
            # The signal's handler must run, also in a process that was stopped.
            rank.process.send_signal(signal.SIGCONT)
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            time.sleep(_DUMP_POLL_S)
            before, latest = latest, [rank.log_path.stat().st_size for rank in running]
            if latest == before and all(map(int.__gt__, latest, first)):
                break
        return [rank.rank for rank in running]

    def close(self) -> None:
        """Kill what still runs, close the links, remove the directory. May be called again."""
        self.kill()
        for rank in self.ranks:
            rank.close()
        shutil.rmtree(self.directory, ignore_errors=True)


def launch(spec: WorkerSpec) -> RankGroup:
    """Start the processes of ``spec``, or none: if one cannot be started, the others are ended.

    Raises:
        RequestError: If a device does not exist.
        OSError: If the system refuses a process.
    """
    visible = [visible_device(device) for device in spec.devices]
    group = RankGroup(Path(tempfile.mkdtemp(prefix=f"comfyui-ferry-{os.getpid()}-")), BufferLender())
    try:
        for index, rank in enumerate(spec.ranks):
            group.ranks.append(_launch_rank(spec, rank, visible[index], group))
    except BaseException:
        group.close()
        raise
    return group


def _launch_rank(spec: WorkerSpec, rank: int, visible: str, group: RankGroup) -> RankProcess:
    ours, theirs = connect()
    heartbeat = SharedFile.create("heartbeat", bootstrap.HEARTBEAT_BYTES)
    their_lifeline, lifeline = os.pipe()
    log_path = group.directory / f"rank{rank}.log"
    command = [sys.executable, *(["-s"] if sys.flags.no_user_site else []), "-P", bootstrap.__file__]
    command += ["--control", str(theirs.fileno()), "--heartbeat", str(heartbeat.descriptor)]
    command += ["--lifeline", str(their_lifeline)]
    command += ["--parent", str(os.getpid()), "--directory", str(group.directory)]
    command += ["--alias", PACK_ALIAS, "--root", str(PACK_ROOT)]
    try:
        with open(log_path, "ab") as log, theirs:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=_environment(spec, rank, visible),
                pass_fds=(theirs.fileno(), heartbeat.descriptor, their_lifeline),
                # The terminal's signals go to the parent alone.
                start_new_session=True,
            )
    except BaseException:
        ours.close()
        os.close(lifeline)
        raise
    finally:
        os.close(their_lifeline)
    counter = mmap.mmap(heartbeat.descriptor, bootstrap.HEARTBEAT_BYTES)
    # Our mapping of received buffers is written by the worker alone; we only copy out of it.
    link = Link(ours, group.lender, writable=True)
    return RankProcess(rank, spec.devices[len(group.ranks)], process, link, log_path, counter, lifeline)


def _environment(spec: WorkerSpec, rank: int, visible: str) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if name not in _CLEARED}
    environment |= {
        # One machine: the ranks meet over loopback, never over an outside interface.
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        "PYTHONUNBUFFERED": "1",
    }
    environment |= spec.environment
    environment |= {
        RANK_VARIABLE: str(rank),
        "CUDA_VISIBLE_DEVICES": visible,
        "OMP_NUM_THREADS": str(spec.threads_per_rank()),
    }
    return environment
