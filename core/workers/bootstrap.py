"""The first code of a worker process, run as a script with ``python -P``; standard library only.

It makes the process safe before anything slow or large is imported: the terminal's Ctrl-C is left
to the parent, crashes and SIGUSR1 write every thread's stack to the log, and a thread watches the
parent, so that a worker ends within a second of it, even in mid-import or inside a collective. Then
it loads the pack under its fixed alias (ComfyUI loads it under a file path as name, which no other
process can import) and hands over to ``worker``.

``-P`` keeps this folder off ``sys.path``, where its files would shadow other packages' modules.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import fcntl
import importlib
import importlib.util
import logging
import mmap
import os
import select
import shutil
import signal
import socket
import struct
import sys
import threading
import time
from pathlib import Path

# The counter of beats, and behind it the one of `progress`; a page, which a GPU can write to.
HEARTBEAT_BYTES = mmap.PAGESIZE
# Where the page says that this process has been inside one call of torch.distributed for a while.
COLLECTIVE_BYTE = 17
_COLLECTIVES = "torch/distributed/"
# The kernel's name of the thread that beats; it keeps 15 characters.
WATCH_THREAD = "ferry-watch"
_HEARTBEAT_PERIOD_S = 0.5
_ADOPTION_S = 1.0
_EXIT_PARENT_GONE = 3
# F_SETSIG of Linux, for which this Python may have no name.
_F_SETSIG = 10


def load_package(alias: str, folder: str) -> None:
    """Load ``folder`` as the top-level package ``alias``, whatever the folder is called."""
    init = Path(folder, "__init__.py")
    spec = importlib.util.spec_from_file_location(alias, init, submodule_search_locations=[folder])
    if spec is None or spec.loader is None:
        raise ImportError(f"{init} cannot be loaded as a package")
    module = importlib.util.module_from_spec(spec)
    sys.modules[alias] = module
    spec.loader.exec_module(module)


def watch_parent(control: int, heartbeat: int, *, parent: int, directory: str) -> mmap.mmap:
    """Start the thread that beats while this process runs, and ends it once the parent is gone.

    Args:
        control: Descriptor of the control socket; only its hang-up is looked at.
        heartbeat: Descriptor of ``HEARTBEAT_BYTES`` of shared memory, which begins with the counter.
        parent: The parent's process id. Asked for too, because a process that the parent forked may
            hold its end of the socket open.
        directory: The pool's private directory. Nobody else is left to remove it.

    Returns:
        The shared memory.
    """
    counter = mmap.mmap(heartbeat, HEARTBEAT_BYTES)
    os.close(heartbeat)

    def watch() -> None:
        with contextlib.suppress(OSError):
            # The parent counts what this process does, and this thread ticks whatever it does.
            Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(WATCH_THREAD)
        poller = select.poll()
        poller.register(control, select.POLLRDHUP)
        beats, place = 0, None
        while True:
            beats += 1
            struct.pack_into("<Q", counter, 0, beats)
            latest = _collective_under_way()
            counter[COLLECTIVE_BYTE] = latest is not None and latest == place
            place = latest
            if poller.poll(_HEARTBEAT_PERIOD_S * 1000) or os.getppid() != parent:
                break
        # A dying process closes its files before its children change hands, so look again for a while.
        until = time.monotonic() + _ADOPTION_S
        while os.getppid() == parent and time.monotonic() < until:
            time.sleep(0.01)
        if os.getppid() != parent:
            shutil.rmtree(directory, ignore_errors=True)
        os._exit(_EXIT_PARENT_GONE)

    threading.Thread(target=watch, name="ferry-parent-watch", daemon=True).start()
    return counter


def _collective_under_way() -> tuple[int, int] | None:
    """Return what tells the main thread's present call of torch.distributed from others; None if in none.

    Making NCCL's connections keeps a core busy while the other ranks have not come, as computing does.
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None or _COLLECTIVES not in frame.f_code.co_filename:
        return None
    return id(frame), frame.f_lasti


def wake_up_with_parents_end(lifeline: int) -> None:
    """Have the kernel send this process SIGCONT once every write end of the pipe is closed.

    Not PR_SET_PDEATHSIG: that follows the *thread* which started us, and ComfyUI's come and go. A
    running process takes no notice of SIGCONT. Source: fcntl(2), F_SETSIG and O_ASYNC.
    """
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, _F_SETSIG, signal.SIGCONT)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)


def main() -> None:
    """Set the process up and run the worker."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--control", type=int, required=True)
    parser.add_argument("--heartbeat", type=int, required=True)
    parser.add_argument("--lifeline", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--directory", required=True)
    parser.add_argument("--alias", required=True)
    parser.add_argument("--root", required=True)
    arguments = parser.parse_args()

    # A program that this worker starts must not keep the socket open.
    os.set_inheritable(arguments.control, False)
    os.set_inheritable(arguments.lifeline, False)
    wake_up_with_parents_end(arguments.lifeline)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    seen = watch_parent(
        arguments.control, arguments.heartbeat, parent=arguments.parent, directory=arguments.directory
    )
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s", stream=sys.stderr)
    # Libraries that parse the command line must not meet ours.
    sys.argv = ["comfyui-ferry-worker"]
    load_package(arguments.alias, arguments.root)
    worker = importlib.import_module(f"{arguments.alias}.core.workers.worker")
    worker.run(socket.socket(fileno=arguments.control), seen)


if __name__ == "__main__":
    main()
