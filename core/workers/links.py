"""Run ``link_probe`` in a throw-away process, and remember its good answers.

A set of GPUs is probed once: the answer is kept in this process and in the user's cache folder, for this
PyTorch and until the machine is started again. Bad answers are not kept, since somebody may repair them.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import RequestError

_TIMEOUT_S = 90.0
_PROBE = Path(__file__).with_name("link_probe.py")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_known: dict[str, dict[str, Any]] = {}
_lock = threading.Lock()


def probe_links(devices: Sequence[str] | None, *, refresh: bool = False) -> dict[str, Any]:
    """Return what ``link_probe`` found, with its ``failure``: one line, or None.

    Args:
        devices: GPUs by UUID; None: those that this process may see.
        refresh: Probe again even if a good answer is known.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") if devices is None else ",".join(devices)
    key = _key(visible)
    with _lock:
        found = None if refresh else _known.get(key) or _read(_cache_file(key))
        if found is None:
            found = _run(visible)
            if found["failure"] is None:
                _write(_cache_file(key), found)
        if found["failure"] is None:
            _known[key] = found
        return found


def known_links(devices: Sequence[str]) -> dict[str, Any] | None:
    """Return what an earlier probe of these GPUs found, if it was good; starts nothing.

    Args:
        devices: GPUs by UUID, in the order in which they were probed.
    """
    key = _key(",".join(devices))
    with _lock:
        found = _known.get(key) or _read(_cache_file(key))
        if found is not None and found["failure"] is None:
            _known[key] = found
            return found
        return None


def check_links(devices: Sequence[str | int]) -> None:
    """Refuse GPUs over which NCCL hangs or gives wrong data, before any worker is started on them.

    Args:
        devices: UUIDs, or indices as this process counts.

    Raises:
        RequestError: With what was seen.
    """
    from .spec import visible_device

    uuids = [visible_device(device) for device in devices]
    found = probe_links(uuids)
    if found["failure"] is not None:
        raise RequestError(
            f"parallel workers on {', '.join(uuids)} were asked",
            limit=f"A trial of their links failed: {found['failure']}",
            way_out="Run `./run doctor`; NCCL_P2P_DISABLE=1 often helps where PCIe ACS or an IOMMU is on",
        )


def _run(visible: str | None) -> dict[str, Any]:
    environment = dict(os.environ)
    environment.pop("PYTORCH_CUDA_ALLOC_CONF", None)
    if visible is not None:
        environment["CUDA_VISIBLE_DEVICES"] = visible
    command = [sys.executable, "-P", str(_PROBE)]
    empty: dict[str, Any] = {"gpus": [], "links": [], "nccl": None}
    try:
        # A session of its own: on a time-out all that it started goes with it.
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            env=environment,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return empty | {"failure": f"it hung for {_TIMEOUT_S:g} s"}
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return empty | {"failure": f"it ended with code {done.returncode}: {last[:300]}"}
    answers = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not answers:
        return empty | {"failure": "it ended without an answer"}
    found = json.loads(answers[-1])
    return found | {"failure": _wrong_data(found)}


def _wrong_data(found: dict[str, Any]) -> str | None:
    # Copies through the driver do not matter to NCCL, which has its own ways; the doctor shows them.
    if found["nccl"] is not None and not found["nccl"]["right"]:
        return "NCCL gave wrong sums"
    return None


def _key(visible: str | None) -> str:
    import torch

    boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
    settings = sorted((name, value) for name, value in os.environ.items() if name.startswith("NCCL_"))
    parts = [torch.__version__, boot, visible, settings]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def _cache_file(key: str) -> Path:
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "comfyui-ferry" / f"links-{key}.json"


def _read(file: Path) -> dict[str, Any] | None:
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError):
        return None


def _write(file: Path, found: dict[str, Any]) -> None:
    partial = file.with_suffix(f".{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(found))
        partial.rename(file)
    except OSError:
        partial.unlink(missing_ok=True)  # A read-only home: the next process probes again.
