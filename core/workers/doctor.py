"""Look a machine over for what breaks parallel sampling, and say for each finding what to do.

Works without a GPU. What touches GPUs runs in a throw-away process (``links``), so a faulty driver cannot
hang the caller. Nothing is changed.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .host_memory import available_host_bytes
from .links import probe_links

_GIB = 1 << 30
_PREFIXES = ("NCCL_", "CUDA_", "PYTORCH_", "TORCH_NCCL_", "GLOO_")
_MASTER = frozenset({"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"})
_MARKS = {"ok": "ok     ", "note": "note   ", "problem": "PROBLEM"}


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        subject: What.
        seen: What was seen there, in one line.
        state: "ok", "note" (slower, or worth knowing) or "problem".
        remedy: What to do, in one line; "" where nothing is to be done.
    """

    subject: str
    seen: str
    state: str = "ok"
    remedy: str = ""


def examine(*, refresh: bool = False) -> list[Finding]:
    """Return all findings.

    Args:
        refresh: Probe the GPUs again even if a good answer is known.
    """
    links = probe_links(None, refresh=refresh)
    return [
        *_system(),
        *_gpus(links),
        *_links(links),
        *_host(),
        *_variables(os.environ),
    ]


def describe(findings: list[Finding]) -> str:
    """Return the findings as text, one or two lines each."""
    lines = []
    for finding in findings:
        lines.append(f"[{_MARKS[finding.state]}] {finding.subject}: {finding.seen}")
        if finding.remedy:
            lines.append(f"            -> {finding.remedy}")
    problems = sum(finding.state == "problem" for finding in findings)
    lines.append(f"{problems} problem{'' if problems == 1 else 's'} found.")
    return "\n".join(lines)


def main() -> None:
    """Print the report; exit code 1 if there is a problem."""
    findings = examine(refresh=True)
    sys.stdout.write(describe(findings) + "\n")
    sys.exit(any(finding.state == "problem" for finding in findings))


def _system() -> Iterator[Finding]:
    release = os.uname().release
    yield Finding("system", f"{sys.platform} {release}, Python {sys.version.split()[0]}")
    yield Finding("PyTorch", f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}")
    if not sys.platform.startswith("linux"):
        yield Finding("platform", sys.platform, "problem", "Workers need Linux; on Windows use WSL2.")
    if "microsoft" in release.lower():
        yield Finding(
            "WSL", "GPUs of WSL2 have no peer-to-peer", "note", "If NCCL hangs, set NCCL_P2P_DISABLE=1."
        )


def _gpus(links: Mapping[str, Any]) -> Iterator[Finding]:
    yield from _driver()
    if links["failure"] is not None:
        remedy = "Try NCCL_P2P_DISABLE=1; then check PCIe ACS and the IOMMU in the BIOS, and the driver."
        yield Finding("GPU probe", links["failure"], "problem", remedy)
        return
    for index, gpu in enumerate(links["gpus"]):
        yield Finding(f"GPU {index}", f"{gpu['name']}, {gpu['total_bytes'] / _GIB:.0f} GiB, {gpu['uuid']}")
    if not links["gpus"]:
        built = torch.version.cuda is not None
        remedy = "Check nvidia-smi and CUDA_VISIBLE_DEVICES." if built else "Install a PyTorch with CUDA."
        yield Finding("GPUs", "PyTorch sees none; workers run on the CPU only", "note", remedy)
    elif len({gpu["name"] for gpu in links["gpus"]}) > 1:
        yield Finding("GPUs", "not all alike", "note", "The slowest sets the pace; choose equal ones.")


def _links(links: Mapping[str, Any]) -> Iterator[Finding]:
    for link in links["links"]:
        way = "peer to peer" if link["peer"] else "through the host"
        seen = f"{link['bytes_per_s'] / 1e9:.1f} GB/s, {way}"
        subject = f"link {link['from']} -> {link['to']}"
        if not link["right"]:
            remedy = "Turn PCIe ACS or the IOMMU off, or set NCCL_P2P_DISABLE=1."
            yield Finding(subject, f"{seen}, WRONG DATA", "problem", remedy)
        elif not link["peer"]:
            yield Finding(subject, seen, "note", "CFG parallel needs little of it; prefer it to Ulysses.")
        else:
            yield Finding(subject, seen)
    if links["nccl"] is not None and links["nccl"]["right"]:  # otherwise it is the probe's failure
        yield Finding("NCCL", f"{links['nccl']['version']}, sums over all GPUs are right")


def _host() -> Iterator[Finding]:
    available = available_host_bytes()
    few = available < 8 * _GIB
    remedy = "The host holds the weights once; close other programs or raise the container's limit."
    yield Finding(
        "host memory", f"{available / _GIB:.1f} GiB available", "note" if few else "ok", remedy if few else ""
    )
    if Path("/dev/shm").is_dir():
        size = shutil.disk_usage("/dev/shm").total
        small = size < _GIB
        remedy = "NCCL needs it: start the container with --shm-size=2g or --ipc=host." if small else ""
        yield Finding("/dev/shm", f"{size / _GIB:.2f} GiB", "note" if small else "ok", remedy)
    else:
        yield Finding("/dev/shm", "missing", "problem", "Mount a tmpfs there; NCCL needs it.")
    pinned = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    limited = pinned != resource.RLIM_INFINITY
    seen = f"{pinned / (1 << 20):.0f} MiB" if limited else "none"
    remedy = "Only RDMA networks need more (ulimit -l unlimited); CUDA pins memory past this limit."
    yield Finding("limit of locked memory", seen, "ok", remedy if limited else "")
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    state = "problem" if files < 256 else "note" if files < 1024 else "ok"
    remedy = "" if state == "ok" else "Raise it: ulimit -n 4096."
    yield Finding("limit of open files", str(files), state, remedy)


def _variables(environment: Mapping[str, str]) -> Iterator[Finding]:
    for name in sorted(environment):
        value = environment[name]
        if name in _MASTER:
            remedy = "Left by a launcher; workers are started without it."
        elif name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
            remedy = "Not handed on to workers."
        elif name == "NCCL_SOCKET_IFNAME":
            remedy = "Workers use the loopback interface instead."
        elif name == "NCCL_P2P_DISABLE" and value not in ("0", ""):
            remedy = "GPUs talk through the host; unset it if peer to peer works."
        elif name == "CUDA_LAUNCH_BLOCKING" and value not in ("0", ""):
            remedy = "Makes everything slow; unset it unless you are debugging."
        elif name.startswith(_PREFIXES):
            remedy = "Inherited by workers; unset it if you did not set it on purpose."
        else:
            continue
        yield Finding(f"variable {name}", value, "note", remedy)


def _driver() -> Iterator[Finding]:
    """Yield what nvidia-smi says, nothing where there is none."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return
    command = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except subprocess.TimeoutExpired:
        remedy = "The driver hangs: look for Xid errors in dmesg, and start the machine anew."
        yield Finding("NVIDIA driver", "nvidia-smi does not answer", "problem", remedy)
        return
    versions = ", ".join(sorted(set(done.stdout.split())))
    if done.returncode == 0 and versions:
        yield Finding("NVIDIA driver", versions)
        return
    said = (done.stderr or done.stdout).strip().splitlines()
    remedy = "Load or reinstall the driver; in a container, start it with --gpus all."
    yield Finding("NVIDIA driver", said[0] if said else "nvidia-smi lists no GPU", "problem", remedy)
