"""From an address to connected agents: room is found, agents are placed and compared, and they connect.

Nothing of the pool runs before all of that has gone well, and whatever goes wrong ends what was begun.
"""

from __future__ import annotations

import json
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...errors import RequestError, WorkerError
from ..spec import PACK_ALIAS, PACK_ROOT, WorkerSpec
from .admission import Admission
from .driver_process import DriverProcess
from .fingerprint import boot_id, differences, fingerprint
from .handshake import SECRET_BYTES
from .node_link import NodeLink
from .placement import NoRoomError, Share, choose_nodes
from .spec import ROOT_VARIABLE, ClusterSpec
from .stream import Stream

# What a pool that has just ended held is free again for Ray after a moment.
_ROOM_S = 10.0
_ROOM_AGAIN_S = 0.5
_POLL_S = 0.05
# Connections that the kernel keeps; strangers may be among them.
_BACKLOG = 512


class Joining:
    """One attempt.

    Args:
        driver: The process that talks to Ray; the caller ends it if the attempt fails.
        spec: The workers.
        cluster: Where they are to run.
        until: When to give up, by ``time.monotonic``.
        poll: Called regularly; what it raises goes to the caller.
    """

    def __init__(
        self,
        driver: DriverProcess,
        spec: WorkerSpec,
        cluster: ClusterSpec,
        *,
        until: float,
        poll: Callable[[], object] | None,
    ) -> None:
        self._driver = driver
        self._spec = spec
        self._cluster = cluster
        self._until = until
        self._poll = poll

    def connect(self) -> list[tuple[NodeLink, dict[str, Any]]]:
        """Return the nodes' agents, checked and connected, with what each said of its node.

        Raises:
            RequestError: If the cluster cannot be joined, has no room, or a node is not like this machine.
            WorkerError: If an agent does not start or connect.
        """
        shares, address = self._find_room()
        nodes = self._place(shares)
        streams = self._gather(shares, address)
        links = []
        for number, (share, node) in enumerate(zip(shares, nodes, strict=True)):
            here = share.here and node["boot_id"] == boot_id() != ""
            share = Share(share.node, share.address, here, share.ranks)
            devices = node["devices"] or ["cpu"] * len(share.ranks)
            link = NodeLink(number, share, streams[number], devices, node["available_bytes"])
            links.append((link, node))
        return links

    def _find_room(self) -> tuple[list[Share], str]:
        """Return the chosen nodes, and this machine's address among them."""
        spec = self._spec
        self._driver.tell("connect", address=self._cluster.address)
        try:
            found = self._driver.wait_for("nodes", until=self._until, poll=self._poll)
        except WorkerError as error:
            raise RequestError(
                f"ray_address={self._cluster.address!r} was asked",
                limit=f"This machine could not join that cluster: {error}",
                way_out="Run `ray start --address=HOST:PORT` on this machine too, with the Python and the "
                "Ray of the others",
            ) from error
        room_until = time.monotonic() + _ROOM_S
        while True:
            try:
                return choose_nodes(found["nodes"], spec.num_ranks, on_gpu=spec.on_gpu), found["address"]
            except NoRoomError as error:
                if error.for_ever or time.monotonic() > room_until:
                    raise
            self._pause(_ROOM_AGAIN_S)
            self._driver.tell("look")
            found = self._driver.wait_for("nodes", until=self._until, poll=self._poll)

    def _place(self, shares: Sequence[Share]) -> list[dict[str, Any]]:
        """Have Ray start the agents; return what each says of its node, all of them like this machine."""
        paths = [*self._spec.import_paths, *self._spec.import_roots.values()]
        variables = self._cluster.path_variables
        files = {name: (paths.index(path), file) for name, (path, file) in self._cluster.same_files.items()}
        asked = {
            "on_gpu": self._spec.on_gpu,
            "paths": [(path, variables.get(path)) for path in paths],
            "files": files,
        }
        kind, other = ("gpus", "cpus") if self._spec.on_gpu else ("cpus", "gpus")
        self._driver.tell(
            "place",
            agents=[{"node": share.node, kind: len(share.ranks), other: 0} for share in shares],
            place={"alias": PACK_ALIAS, "root": str(PACK_ROOT), "root_variable": ROOT_VARIABLE},
            requests=[json.dumps(asked | {"address": share.address}) for share in shares],
        )
        answers: dict[int, dict[str, Any]] = {}
        while len(answers) < len(shares):
            event = self._driver.wait_for("placed", until=self._until, poll=self._poll)
            if event["error"] is not None:
                address = shares[event["agent"]].address
                raise WorkerError(f"no agent started on node {address}: {event['error']}")
            answers[event["agent"]] = json.loads(event["answer"])
        here = fingerprint(PACK_ROOT, {name: Path(paths[i], file) for name, (i, file) in files.items()})
        for number, share in enumerate(shares):
            check_node(share, answers[number], here)
        return [answers[number] for number in range(len(shares))]

    def _gather(self, shares: Sequence[Share], address: str) -> list[Stream]:
        """Have the agents connect to a port that is open only meanwhile; return the connections."""
        secret = secrets.token_bytes(SECRET_BYTES)
        with socket.create_server((address, 0), backlog=_BACKLOG) as listener:
            common = {"host": address, "port": listener.getsockname()[1], "secret": secret.hex()}
            requests = [
                json.dumps(common | {"number": number, "address": share.address})
                for number, share in enumerate(shares)
            ]
            self._driver.tell("serve", requests=requests)
            return Admission(secret, len(shares)).run(listener, self._check_agents)

    def _check_agents(self, missing: int) -> None:
        if self._poll is not None:
            self._poll()
        for event in self._driver.events(0.0):
            raise WorkerError(f"an agent ended while it was connecting: {event.get('error') or event}")
        if time.monotonic() > self._until:
            raise WorkerError(
                f"{missing} nodes did not connect to this machine in time: a firewall may be between them"
            )

    def _pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if self._poll is not None:
                self._poll()
            time.sleep(_POLL_S)


def check_node(share: Share, node: Mapping[str, Any], here: Mapping[str, str]) -> None:
    """Refuse a node that cannot run the ranks as this machine would.

    Args:
        share: The node and its ranks.
        node: What ``agent.describe`` said.
        here: This machine's fingerprint.

    Raises:
        RequestError: Naming the node and every difference.
    """
    problems = [node["problem"]] if "problem" in node else differences(here, node["fingerprint"])
    if not problems and node["interface"] is None:
        problems = [f"no network interface there has the address {share.address}"]
    if not problems and node["devices"] and len(node["devices"]) != len(share.ranks):
        problems = [f"Ray gave {len(share.ranks)} GPUs there but PyTorch sees {len(node['devices'])}"]
    if problems:
        raise RequestError(
            f"ranks {share.ranks[0]} to {share.ranks[-1]} on node {share.address} were asked",
            limit=f"That node is not like this machine: {'; '.join(problems)}",
            way_out="Install the same versions on every machine. A node's pack is looked for at the path "
            f"that it has here, or at {ROOT_VARIABLE} of the shell that ran `ray start` (docs/clusters.md)",
        )
