"""Start worker processes inside ComfyUI's code base, and tell the browser."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import comfy
import comfy.model_management

from ..errors import WorkerError
from ..log import get_logger
from ..workers import ClusterPool, ClusterSpec, RankEngine, WorkerPool, WorkerSpec
from .model_export import comfyui_arguments
from .worker_notices import WorkerNotice, loss_notice

_log = get_logger("workers")


# The environment variable with which a cluster's node says where its ComfyUI lies.
_PATH_VARIABLE = "COMFYUI_PATH"
_VERSION_FILE = "comfyui_version.py"
# ComfyUI refuses a folder that does not exist; those of this machine mean nothing on another one.
_FOLDER_OPTION = re.compile(r"--[a-z-]*(directory|root|config|url|path)(=|$)")


class _GivenUpError(BaseException):
    """What was done meanwhile failed, so the workers are not wanted."""


def start_pool_while(
    meanwhile: Callable[[], object], devices: tuple[str, ...], *, again: bool, ray_address: str = ""
) -> RankEngine:
    """Start workers, as ``start_pool`` does, while this thread does what needs none.

    Args:
        meanwhile: Called here; what it raises ends the start.
        devices: Their devices.
        again: Whether others were lost before.
        ray_address: Of their cluster.
    """
    started: Future[RankEngine] = Future()
    given_up = threading.Event()

    def poll() -> None:
        check_interrupt()
        if given_up.is_set():
            raise _GivenUpError

    def start() -> None:
        try:
            started.set_result(start_pool(devices, again=again, ray_address=ray_address, poll=poll))
        except BaseException as error:  # noqa: BLE001 - handed to the caller's thread
            started.set_exception(error)

    # A daemon: ComfyUI that ends meanwhile does not wait for it, and the workers end with ComfyUI.
    threading.Thread(target=start, name="ferry-start", daemon=True).start()
    try:
        meanwhile()
        return started.result()
    except BaseException:
        given_up.set()
        with contextlib.suppress(BaseException):
            started.result().close()
        raise


def start_pool(
    devices: tuple[str, ...],
    *,
    again: bool,
    ray_address: str = "",
    poll: Callable[[], None] | None = None,
) -> RankEngine:
    """Start one worker a device, or none; Cancel ends the start.

    Args:
        devices: Their devices.
        again: Whether others were lost before.
        ray_address: Of the cluster that they are to run on; "": on this machine.
        poll: Called while waiting; what it raises ends the start. None: Cancel alone does.

    Raises:
        RequestError: If the cluster cannot run them.
        WorkerError: If a worker does not start; then none is left running.
    """
    _log.info("starting %d workers on %s", len(devices), ", ".join(devices))
    WorkerNotice("starting", len(devices)).send()
    start_s = time.monotonic()
    poll = poll or check_interrupt
    try:
        if ray_address:
            pool = ClusterPool.start(_cluster_workers(devices), _cluster(ray_address), poll=poll)
        else:
            pool = WorkerPool.start(_spec(devices), poll=poll)
    except WorkerError as error:
        loss_notice(str(error), len(devices)).send()
        raise
    kind = "restarted" if again else "started"
    WorkerNotice(kind, len(devices), seconds=time.monotonic() - start_s).send()
    return pool


def check_interrupt() -> None:
    """Raise ComfyUI's exception if the user pressed Cancel."""
    comfy.model_management.throw_exception_if_processing_interrupted()


def _comfyui_root() -> str:
    return str(Path(next(iter(comfy.__path__))).resolve().parent)


def _cluster(ray_address: str) -> ClusterSpec:
    root = _comfyui_root()
    return ClusterSpec(
        ray_address,
        path_variables={root: _PATH_VARIABLE},
        same_files={"ComfyUI": (root, _VERSION_FILE)},
    )


def _cluster_workers(devices: tuple[str, ...]) -> WorkerSpec:
    """Return the workers for a cluster, without the folders of this machine."""
    arguments = comfyui_arguments()
    arguments["argv"] = without_folders(arguments["argv"])
    return replace(_spec(devices), setup_args={"arguments": arguments})


def without_folders(argv: Sequence[str]) -> list[str]:
    """Return a ComfyUI command line without the options that name folders and files of this machine."""
    kept: list[str] = []
    skipping = False
    for word in argv:
        if word.startswith("--"):
            skipping = _FOLDER_OPTION.match(word) is not None
        if not skipping:
            kept.append(word)
    return kept


def _spec(devices: tuple[str, ...]) -> WorkerSpec:
    on_cpu = devices[0] == "cpu"
    return WorkerSpec(
        devices=devices,
        backend="gloo" if on_cpu else "nccl",
        setup="core.comfy_adapter.jobs",
        setup_args={"arguments": comfyui_arguments()},
        import_paths=(_comfyui_root(),),
    )
