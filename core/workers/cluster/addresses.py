"""Which Ray clusters may be joined: those that this machine is a node of already.

An address may come from anywhere, for example with a workflow of somebody else's, and whoever runs a cluster
runs code in what joins it. That `ray start` was run on this machine is its owner's word that the cluster is
trusted; it is found by looking at the running processes of ComfyUI's own user and of root, since any other
user could run one that leads to a cluster of his own. Nobody else is contacted. Source: proc(5).
"""

from __future__ import annotations

import importlib.util
import ipaddress
import os
import socket
from pathlib import Path

from ...errors import RequestError
from .fingerprint import interface_of

AUTO = "auto"
_OPTION = "--gcs-address="
_REACH_S = 3.0


def check_address(address: str) -> None:
    """Refuse what is no address of a cluster; nothing is looked at or contacted.

    Args:
        address: ``host:port`` of the head, or ``auto``.

    Raises:
        RequestError: If Ray is not installed, or the address is malformed.
    """
    if importlib.util.find_spec("ray") is None:
        raise RequestError(
            f"ray_address={address!r} was asked",
            limit="Ray is not installed in this Python",
            way_out="Install the pack's extra: pip install 'comfyui-ferry[cluster]', or pip install ray",
        )
    host, _, port = address.rpartition(":")
    if address != AUTO and (not host or "/" in host or not port.isdigit() or not 0 < int(port) < 1 << 16):
        raise RequestError(
            f"ray_address={address!r} was asked",
            limit="It is host:port as `ray start --head` prints it, or auto (ray:// addresses are not taken)",
            way_out="Write for example 192.168.1.10:6379, or leave it empty to use this machine alone",
        )


def find_cluster(address: str, root: Path = Path("/proc")) -> str:
    """Return the address, as Ray knows it, of the cluster that is meant and that this machine belongs to.

    Args:
        address: As for ``check_address``.
        root: Where the proc file system is mounted.

    Raises:
        RequestError: If no node of that cluster runs on this machine, ``auto`` is not clear, or the head does
            not answer.
    """
    running = sorted(_running(root))
    here = f"Ray nodes running here: {', '.join(running) or 'none'}"
    fitting = [known for known in running if address == AUTO or _same(address, known)]
    if not fitting:
        raise RequestError(
            f"ray_address={address!r} was asked",
            limit=f"This machine is not a node of that cluster ({here})",
            way_out="If you trust it, run `ray start --address=HOST:PORT` on this machine, as ComfyUI's user "
            "or root (docs/clusters.md)",
        )
    if len(fitting) > 1:
        raise RequestError(
            f"ray_address={address!r} was asked",
            limit=f"This machine is a node of several clusters ({here})",
            way_out="Name the one that is meant",
        )
    host, _, port = fitting[0].rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_REACH_S).close()
    except OSError as error:
        raise RequestError(
            f"ray_address={address!r} was asked",
            limit=f"The head of that cluster, {fitting[0]}, does not answer ({error})",
            way_out="Check the network and that `ray start --head` still runs there",
        ) from error
    return fitting[0]


def _running(root: Path) -> set[str]:
    """Return the heads' addresses of the Ray nodes (raylets) of this machine that may be trusted."""
    found = set()
    for folder in root.iterdir():
        if not folder.name.isdigit():
            continue
        try:
            words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
            trusted = _users(folder) <= {os.getuid(), 0}
        except OSError:
            continue  # it has ended, or is nobody's business
        if Path(words[0]).name == "raylet" and trusted:
            found |= {word.removeprefix(_OPTION) for word in words if word.startswith(_OPTION)}
    return found


def _users(folder: Path) -> set[int]:
    """Return the users (real, effective, ...) of a process.

    Not the owner of its folder, which is root's for whoever forbids others to look into its memory.
    """
    lines = (folder / "status").read_text().splitlines()
    return {int(user) for line in lines if line.startswith("Uid:") for user in line.split()[1:]} or {-1}


def _same(address: str, known: str) -> bool:
    """Return whether ``address`` means the head at ``known``, whose host is an IP address."""
    (host, _, port), (known_host, _, known_port) = address.rpartition(":"), known.rpartition(":")
    if port != known_port:
        return False
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None, family=socket.AF_INET)}
    except OSError:
        return False
    on_this_machine = interface_of(known_host) is not None
    return known_host in found or (
        on_this_machine and any(ipaddress.ip_address(each).is_loopback for each in found)
    )
