"""Which nodes of a cluster run how many ranks; decided from what Ray says of them, before anything starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import RequestError


@dataclass(frozen=True)
class Share:
    """One node's part of a pool.

    Attributes:
        node: Ray's id of the node.
        address: Its IP address.
        here: Whether it is the node that this process belongs to.
        ranks: The ranks that run there.
    """

    node: str
    address: str
    here: bool
    ranks: range


def choose_nodes(nodes: Sequence[Mapping[str, Any]], num_ranks: int, *, on_gpu: bool) -> list[Share]:
    """Return the fewest nodes that have room, the fullest share first; this machine wins a tie.

    Few nodes, because the innermost ranks exchange the most and neighbours have neighbouring numbers.

    Args:
        nodes: What ``ray_driver`` says of each live node.
        num_ranks: Ranks in all, each of which takes one GPU, or one CPU.
        on_gpu: Which of the two.

    Raises:
        RequestError: If the cluster has not as many, or others hold them.
    """
    kind = "gpus" if on_gpu else "cpus"
    by_room = sorted(nodes, key=lambda node: (-min(node[f"free_{kind}"], num_ranks), not node["here"]))
    shares, first = [], 0
    for node in by_room:
        count = min(node[f"free_{kind}"], num_ranks - first)
        if count > 0:
            ranks = range(first, first + count)
            shares.append(Share(node["id"], node["address"], node["here"], ranks))
            first += count
    if first == num_ranks:
        return shares
    noun = kind.upper().removesuffix("S") + "s"
    each = ", ".join(f"{node['address']}: {node[f'free_{kind}']} of {node[kind]} free" for node in nodes)
    total, free = (sum(node[key] for node in nodes) for key in (kind, f"free_{kind}"))
    raise NoRoomError(
        f"gpus={num_ranks} was asked of a Ray cluster",
        limit=f"Its {len(nodes)} nodes have {total} {noun} in all, of which {free} are free ({each})",
        way_out=f"Set gpus to at most {total}, run `ray start` on more machines, or wait for other Ray jobs",
        for_ever=total < num_ranks,
    )


class NoRoomError(RequestError):
    """The cluster has not as many GPUs (or CPUs); ``for_ever`` if none that is held could help."""

    def __init__(self, asked: str, *, limit: str, way_out: str, for_ever: bool) -> None:
        super().__init__(asked, limit=limit, way_out=way_out)
        self.for_ever = for_ever
